"""The torch tier on the CPU against the reference tier, which other tests compare with float64 arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_core.architectures import Activation, RopeStyle, Xielu
from slm_core.errors import BackendUnavailable, InvalidModelFile, InvalidOption, UnsupportedModel
from slm_core.gguf import GgmlType
from slm_core.quant import QuantizedTensor, dequantize
from slm_native.kernels import Scoring, WeightBytes
from slm_native.kernels.reference import ReferenceKernels
from slm_native.kernels.select import select_kernels

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")
gguf = pytest.importorskip("gguf")

from slm_native.kernels.torch import kernels as torch_kernels  # noqa: E402
from slm_native.kernels.torch.kernels import TorchKernels  # noqa: E402
from slm_native.kernels.torch.upload import Uploader  # noqa: E402

ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Relative error of one rounding to nearest."""


def f32(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def quantized(weights: NDArray[np.float32], name: str) -> QuantizedTensor:
    data = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
    return QuantizedTensor("w", weights.shape, GgmlType[name], data.view(np.uint8).reshape(-1))


def assert_is_product(y, x, tensor: QuantizedTensor, bias=0.0, dtype: str = "float32") -> None:
    """The error is within one rounding of both factors and the result to ``dtype``, and float32 sums of n products."""
    w = dequantize(tensor.data, tensor.ggml_type, tensor.shape).astype(np.float64)
    expected = x.astype(np.float64) @ w.T + bias
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(w.T) + np.abs(bias)
    relative = 3 * ROUNDING[dtype] * (dtype != "float32") + (w.shape[1] + 4) * ROUNDING["float32"]
    assert y.shape == expected.shape
    worst = np.max(np.abs(y - expected) / (relative * magnitude))
    assert worst <= 1, f"off by {worst:.2f} times the bound of {dtype} rounding"


@pytest.mark.parametrize("n_tokens", [1, 7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0", "Q5_1", "TQ2_0"])
def test_matmul(name, dtype, n_tokens):
    kernels = TorchKernels("cpu", dtype)
    tensor, x, bias = quantized(f32(37, 512, seed=1), name), f32(n_tokens, 512, seed=2), f32(37, seed=3)
    weight = kernels.prepare(tensor)
    y = kernels.matmul(kernels.from_host(x), weight)
    assert y.dtype == torch.float32
    assert_is_product(kernels.to_host(y), x, tensor, dtype=dtype)
    biased = kernels.matmul(kernels.from_host(x), weight, kernels.from_host(bias))
    assert_is_product(kernels.to_host(biased), x, tensor, bias, dtype)


@pytest.mark.parametrize("panel_rows", [1, 5, 36, 37, 100])
def test_matmul_in_panels(panel_rows, monkeypatch):
    monkeypatch.setattr(torch_kernels, "_CPU_PANEL_WEIGHTS", panel_rows * 96)
    kernels = TorchKernels("cpu")
    tensor, x = quantized(f32(37, 96, seed=1), "Q8_0"), f32(3, 96, seed=2)
    assert_is_product(kernels.to_host(kernels.matmul(kernels.from_host(x), kernels.prepare(tensor))), x, tensor)


def test_weights_stay_packed_in_the_mapped_file_up_to_expanded_bytes():
    tensors = [quantized(f32(8, 32, seed=i), "Q8_0") for i in range(3)]
    kernels = TorchKernels("cpu", expanded_bytes=2 * 8 * 32 * 4)
    weights = [kernels.prepare(tensor) for tensor in tensors]
    x = f32(2, 32, seed=9)
    for _ in range(2):
        for i in (2, 0, 1):
            assert_is_product(kernels.to_host(kernels.matmul(kernels.from_host(x), weights[i])), x, tensors[i])
    assert [weight.expanded is not None for weight in weights] == [True, False, True]
    assert np.shares_memory(weights[1].packed.numpy(), tensors[1].data)


def test_embedding_rows_equal_the_reference():
    kernels, reference = TorchKernels("cpu"), ReferenceKernels()
    tensor = quantized(f32(11, 64, seed=1), "Q5_0")
    ids = np.array([3, 10, 0, 3], np.int32)
    actual = kernels.embed(kernels.prepare(tensor), ids)
    np.testing.assert_array_equal(kernels.to_host(actual), reference.embed(reference.prepare(tensor), ids))
    for bad in ([11], [-1]):
        with pytest.raises(IndexError, match="there are 11 rows"):
            kernels.embed(kernels.prepare(tensor), np.array(bad, np.int32))


def test_rows_by_slice_ids_and_mask():
    kernels, x = TorchKernels("cpu"), f32(5, 3, seed=1)
    mask = np.array([True, False, False, True, True])
    for rows in (slice(1, 3), np.array([4, 0, 4]), mask, ~mask & mask):
        np.testing.assert_array_equal(kernels.to_host(kernels.rows(kernels.from_host(x), rows)), x[rows])


def test_norms_and_activations():
    """Within a few float32 roundings; exp errs by at most two units in the last place."""
    kernels, reference = TorchKernels("cpu"), ReferenceKernels()
    x, y, weight = f32(3, 5, 48, seed=1) * 10, f32(3, 5, 48, seed=2), f32(48, seed=3)
    on_device = [kernels.from_host(each) for each in (x, y, weight)]
    actual = kernels.to_host(kernels.rms_norm(on_device[0], on_device[2], 1e-5))
    np.testing.assert_allclose(actual, reference.rms_norm(x, weight, 1e-5), rtol=60 * ROUNDING["float32"])
    actual = kernels.to_host(kernels.silu_mul(on_device[0], on_device[1]))
    np.testing.assert_allclose(actual, reference.silu_mul(x, y), rtol=8 * ROUNDING["float32"], atol=1e-38)


@pytest.mark.parametrize("style", list(RopeStyle))
@pytest.mark.parametrize("n_dims", [16, 10])
def test_rope(style, n_dims):
    kernels, reference = TorchKernels("cpu"), ReferenceKernels()
    angles = np.random.default_rng(1).uniform(-9, 9, (7, n_dims // 2)).astype(np.float32)
    x, cos, sin = f32(7, 3, 16, seed=2), np.cos(angles), np.sin(angles)
    actual = kernels.to_host(kernels.rope(*(kernels.from_host(each) for each in (x, cos, sin)), style))
    np.testing.assert_allclose(actual, reference.rope(x, cos, sin, style), atol=3 * ROUNDING["float32"] * 8)


ACTIVATIONS = [*(each for each in Activation if each is not Activation.SWIGLU_CLAMPED), Xielu(0.8, 0.7, 0.5, -1e-6)]


@pytest.mark.parametrize("activation", [*ACTIVATIONS, Activation.SWIGLU_CLAMPED], ids=str)
def test_activations(activation):
    """Within the rounding of a dozen float32 operations on numbers of magnitude 10."""
    kernels, reference = TorchKernels("cpu"), ReferenceKernels()
    gate, up = f32(5, 48, seed=1) * 5, f32(5, 48, seed=2) * 5
    steps = ["gated"] if activation is Activation.SWIGLU_CLAMPED else ["gated", "activate"]
    for step in steps:
        args = (gate, up) if step == "gated" else (gate,)
        actual = kernels.to_host(getattr(kernels, step)(*(kernels.from_host(each) for each in args), activation))
        expected = getattr(reference, step)(*args, activation)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=100 * ROUNDING["float32"])


def test_smaller_steps():
    kernels, reference = TorchKernels("cpu"), ReferenceKernels()
    x, weight, bias = f32(7, 3, 48, seed=1) * 4, f32(3, 48, seed=2), f32(3, 48, seed=3)
    device, weights = kernels.from_host(x), kernels.from_host(weight)
    pairs = [
        (kernels.sigmoid(device), reference.sigmoid(x)),
        (kernels.softcap(device, 3.0), reference.softcap(x, 3.0)),
        (kernels.clip(device, 1.5), reference.clip(x, 1.5)),
        (kernels.concatenated([device, device[:2]]), reference.concatenated([x, x[:2]])),
        (
            kernels.layer_norm(device, weights, kernels.from_host(bias), 1e-5),
            reference.layer_norm(x, weight, bias, 1e-5),
        ),
        (
            kernels.layer_norm(device, weights, None, 1e-5),
            reference.layer_norm(x, weight, None, 1e-5),
        ),
        (kernels.rms_norm(device, weights, 1e-5), reference.rms_norm(x, weight, 1e-5)),
    ]
    for actual, expected in pairs:
        np.testing.assert_allclose(kernels.to_host(actual), expected, rtol=1e-5, atol=60 * ROUNDING["float32"])


SCORINGS = {
    "plain": {},
    "window": {"window": 3},
    "softcap": {"softcap": 2.0},
    "slopes": {"slopes": True},
    "sinks": {"sinks": True},
    "all": {"window": 4, "softcap": 2.0, "slopes": True, "sinks": True},
}


@pytest.mark.parametrize(("n_tokens", "n_held"), [(1, 1), (1, 70), (5, 5), (5, 70)])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(6, 6), (6, 2), (3, 1)])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_attention(n_tokens, n_held, n_heads, n_kv_heads, scoring, monkeypatch):
    monkeypatch.setattr("slm_native.kernels.torch.attention._SCORES_AT_A_TIME", 2 * n_heads * n_held)
    kernels, reference = TorchKernels("cpu"), ReferenceKernels()
    q, k, v = (
        f32(n_tokens, n_heads, 24, seed=1),
        f32(n_held, n_kv_heads, 24, seed=2),
        f32(n_held, n_kv_heads, 24, seed=3),
    )
    options = {
        name: np.random.default_rng(4).uniform(0.1, 2, n_heads).astype(np.float32) if value is True else value
        for name, value in SCORINGS[scoring].items()
    }
    device_options = {name: kernels.from_host(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    on_device = (kernels.from_host(each) for each in (q, k, v))
    actual = kernels.to_host(kernels.attention(*on_device, 0.3, Scoring(**device_options)))
    # Scores are sums of 24 products of magnitude 1: they err by 24 roundings of about 5, and so do the weights.
    expected = reference.attention(q, k, v, 0.3, Scoring(**options))
    np.testing.assert_allclose(actual, expected, atol=24 * 5 * ROUNDING["float32"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "cuda:99"}, BackendUnavailable, "torch .* has no device 'cuda:99' on this machine .it has: .*cpu"),
        ({"device": "toaster"}, BackendUnavailable, "has no device 'toaster'"),
        ({"device": "cpu", "dtype": "int8"}, InvalidOption, "unknown dtype 'int8' .accepted: auto, float32, bfloat16"),
        ({"expanded_bytes": -1}, InvalidOption, "must not be negative"),
    ],
)
def test_unknown_devices_and_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        select_kernels("torch", **options)


def test_prepare_refuses_the_same_tensors_as_the_reference():
    for shape, ggml_type, n_bytes, error in (
        ((32,), GgmlType.F32, 128, InvalidModelFile),
        ((2, 32), GgmlType.Q8_0, 67, InvalidModelFile),
        ((1, 256), GgmlType.Q8_K, 292, UnsupportedModel),
    ):
        with pytest.raises(error, match=r"tensor 'blk\.3\.w'"):
            TorchKernels("cpu").prepare(QuantizedTensor("blk.3.w", shape, ggml_type, np.zeros(n_bytes, np.uint8)))


def test_weights_beyond_device_memory_are_refused_with_sizes(monkeypatch):
    kernels = TorchKernels("cpu")
    kernels.reserve(WeightBytes(1 << 60, [], 0))  # the CPU uses the mapped file: it reserves nothing
    monkeypatch.setattr(torch_kernels, "memory", lambda device: (3 << 30, 8 << 30))
    kernels.reserve(WeightBytes(1 << 30, [1 << 30], 1 << 30))
    with pytest.raises(UnsupportedModel, match=r"weights take 3073 MiB, and 3072 of the 8192 MiB of cpu are free"):
        kernels.reserve(WeightBytes(1 << 30, [2 << 30, 3 << 30], 1 << 20, absent=3 << 30))


@pytest.mark.parametrize("n_bytes", [0, 1, 999, 1000, 1001, 4321])
def test_an_upload_in_chunks_is_complete(n_bytes, monkeypatch):
    """Devices other than the CPU and CUDA get one chunk after another; here the CPU stands in for one."""
    data = np.random.default_rng(1).integers(0, 256, n_bytes, np.uint8)
    data.flags.writeable = False
    uploader = Uploader(torch.device("cpu"), chunk_bytes=1000)
    uploader._device = type("Elsewhere", (), {"type": "mps", "__index__": lambda self: 0})()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, dtype, device: empty(n, dtype=dtype))
    np.testing.assert_array_equal(uploader.upload(data).numpy(), data)
