"""Dequantization in torch, bit for bit against NumPy, which other tests compare with the gguf package."""

from __future__ import annotations

import numpy as np
import pytest

from slm_core.errors import UnsupportedModel
from slm_core.gguf import GgmlType
from slm_core.quant import dequantize, supported_types

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")

from slm_native.kernels.torch.unpack import unpack, unpacked_types  # noqa: E402


def test_all_supported_types_are_unpacked():
    assert unpacked_types() == supported_types()


@pytest.mark.parametrize("ggml_type", supported_types(), ids=lambda t: t.name)
def test_random_blocks_equal_numpy_bit_for_bit(ggml_type):
    """2048 random blocks in 8 rows, with infinities, NaN, subnormal scales and codes that no quantizer writes."""
    n_blocks = 2048
    data = np.random.default_rng(ggml_type).integers(0, 256, n_blocks * ggml_type.block_bytes, np.uint8)
    shape = (8, n_blocks // 8 * ggml_type.block_size)
    expected = dequantize(data, ggml_type, shape)
    actual = unpack(torch.from_numpy(data.reshape(8, -1)), ggml_type).numpy()
    assert (actual.dtype, actual.shape) == (np.float32, shape)
    different = (actual.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(actual) & np.isnan(expected))
    positions = np.argwhere(different)
    assert not different.any(), (
        f"{len(positions)} weights differ, first {actual[tuple(positions[0])]} at {positions[0]}"
    )
    assert np.count_nonzero(expected) > expected.size // 4, "the test data is almost all zeros"


@pytest.mark.parametrize("ggml_type", supported_types(), ids=lambda t: t.name)
def test_strided_and_misaligned_rows(ggml_type):
    """Panels and selected rows of a matrix are views at any offset of its storage."""
    data = np.random.default_rng(ggml_type).integers(0, 256, (6, 3 * ggml_type.block_bytes), np.uint8)
    expected = dequantize(data.reshape(-1), ggml_type, (6, 3 * ggml_type.block_size))
    shifted = torch.empty(data.size + 1, dtype=torch.uint8)[1:].view(data.shape)
    shifted.copy_(torch.from_numpy(data))
    np.testing.assert_array_equal(unpack(shifted[1:4], ggml_type).numpy(), expected[1:4])
    np.testing.assert_array_equal(unpack(shifted[::2], ggml_type).numpy(), expected[::2])


def test_unsupported_types_are_refused():
    with pytest.raises(UnsupportedModel, match=r"torch tier has no tensor type Q8_K \(supported: F32, F16"):
        unpack(torch.zeros(1, 292, dtype=torch.uint8), GgmlType.Q8_K)
