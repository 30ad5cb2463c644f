"""Packed matrices for MatMulNBits against the dequantized weights."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant import QuantizedTensor, format_of
from slm_onnx.nbits import PackedMatrix, pack

onnxruntime = pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")

N_OUT, N_IN = 7, 768  # not square, no powers of two; three blocks of the widest types
CODES = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 NVFP4 TQ2_0"
OTHERS = "F32 F16 BF16 IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S TQ1_0"


def random_tensor(ggml_type: GgmlType) -> QuantizedTensor:
    """Random codes; scales of both signs with magnitudes from 0.5 to 2."""
    rng = np.random.default_rng(ggml_type)
    data = rng.integers(0, 256, N_OUT * N_IN // ggml_type.block_size * ggml_type.block_bytes, np.uint8)
    blocks = data.view(format_of(ggml_type).block)
    for name in {"scale", "min_scale", "minimum"} & set(blocks.dtype.names or ()):
        blocks[name] = rng.uniform(0.5, 2, blocks.shape) * rng.choice([-1, 1], blocks.shape)
    if ggml_type is GgmlType.MXFP4:
        blocks["exponent"] = rng.integers(120, 130, blocks.shape)
    return QuantizedTensor("w", (N_OUT, N_IN), ggml_type, data)


def unpack(packed: PackedMatrix) -> NDArray[np.float64]:
    """The weights of a packed matrix, by the documentation of MatMulNBits."""
    codes = packed.codes
    if packed.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    zero = 1 << (packed.bits - 1)  # the default of MatMulNBits
    weights = (codes.astype(np.float64) - zero) * packed.scales[..., None]
    if packed.correction is not None:
        weights += packed.correction.T[..., None]
    return weights.reshape(N_OUT, N_IN)


@pytest.mark.parametrize("name", CODES.split())
def test_packed_weights_equal_those_of_the_file(name: str) -> None:
    ggml_type = GgmlType[name]
    tensor = random_tensor(ggml_type)
    packed = pack(tensor)
    assert packed is not None, f"{name} has codes and scales, but is not packed"
    expected = gguf.quants.dequantize(tensor.data.reshape(N_OUT, -1), gguf.GGMLQuantizationType(ggml_type))
    # A correction adds three float32 roundings of numbers up to 32 * 2 * 63 * 2.
    bound = 0 if packed.correction is None else 3 * 2.0**-24 * 8064
    assert np.abs(unpack(packed) - expected).max() <= bound


@pytest.mark.parametrize("name", OTHERS.split())
def test_types_without_codes_and_scales_are_not_packed(name: str) -> None:
    ggml_type = GgmlType[name]
    data = np.zeros(N_OUT * N_IN // ggml_type.block_size * ggml_type.block_bytes, np.uint8)
    assert pack(QuantizedTensor("w", (N_OUT, N_IN), ggml_type, data)) is None


def test_small_codes_keep_a_zero_point_beyond_four_bits() -> None:
    """Codes of Q6_K below 16 would fit four bits, but their zero point, 32, does not."""
    tensor = random_tensor(GgmlType.Q6_K)
    blocks = tensor.data.view(format_of(GgmlType.Q6_K).block)
    blocks["high_bits"] = 0
    packed = pack(tensor)
    assert packed is not None
    expected = gguf.quants.dequantize(tensor.data.reshape(N_OUT, -1), gguf.GGMLQuantizationType.Q6_K)
    assert np.abs(unpack(packed) - expected).max() == 0
