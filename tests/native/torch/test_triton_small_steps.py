"""Fused Triton steps in the interpreter, against the separate steps of the reference tier."""

from __future__ import annotations

import numpy as np
import pytest

from slm_core.architectures import RopeStyle
from slm_native.kernels.reference import ReferenceKernels
from slm_native.kv import PageLayout, codec_of

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")
pytest.importorskip("triton", reason="kernels for CUDA are tested in Triton's interpreter: pip install triton")

from slm_native.kernels.torch.pages import TorchPageStore  # noqa: E402
from slm_native.kernels.torch.triton import small_steps  # noqa: E402

REFERENCE = ReferenceKernels()
EPS = 1e-5


def f32(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def on_device(*arrays):
    return tuple(None if array is None else torch.from_numpy(array.copy()) for array in arrays)


def parts_of_rows(*arrays):
    """Tensors whose rows are side by side in common memory, like the results of one product."""
    widths = [array[0].size for array in arrays]
    whole = torch.from_numpy(np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1))
    return [part.view(array.shape) for part, array in zip(whole.split(widths, dim=1), arrays, strict=True)]


@pytest.mark.parametrize("shape", [(1, 1), (3, 1025), (5, 7)])
@pytest.mark.parametrize("placed", [on_device, parts_of_rows])
def test_silu_mul(shape, placed):
    gate, up = f32(*shape, seed=1) * 20, f32(*shape, seed=2)
    actual = small_steps.silu_mul(*placed(gate, up)).numpy()
    np.testing.assert_allclose(actual, REFERENCE.silu_mul(gate, up), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 1), (3, 48), (2, 3, 1025)])
def test_rms_norm(shape):
    x, weight = f32(*shape, seed=1), f32(shape[-1], seed=3)
    actual = small_steps.rms_norm(*on_device(x, weight), EPS)
    np.testing.assert_allclose(actual.numpy(), REFERENCE.rms_norm(x, weight, EPS), rtol=1e-5, atol=1e-7)


def norm_and_rope(x, weight, cos, sin, style):
    normed = x if weight is None else REFERENCE.rms_norm(x, weight, EPS)
    return REFERENCE.rope(normed, cos, sin, style)


@pytest.mark.parametrize("style", list(RopeStyle))
@pytest.mark.parametrize(("width", "n_dims"), [(32, 32), (32, 20), (24, 24), (24, 6)])
@pytest.mark.parametrize("normed", [False, True])
def test_norm_and_rope(style, width, n_dims, normed):
    x, angles = f32(5, 3, width, seed=1), f32(5, n_dims // 2, seed=2) * 3
    weight, cos, sin = f32(width, seed=3) if normed else None, np.cos(angles), np.sin(angles)
    device = on_device(x, weight, cos, sin)
    heads, _ = parts_of_rows(x, f32(5, 2, width, seed=4))
    actual = small_steps.norm_and_rope(heads, device[1], EPS, device[2], device[3], style).numpy()
    np.testing.assert_allclose(actual, norm_and_rope(x, weight, cos, sin, style), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("style", list(RopeStyle))
def test_norm_rope_and_store(kv_type, style):
    """Keys at shuffled pages and slots: within one step of the KV type of the reference; nothing else is written."""
    codec = codec_of(kv_type, 64)
    store = TorchPageStore(PageLayout(range(2), 3, 64, codec, codec), 4, torch.device("cpu"))
    x, weight, angles = f32(6, 3, 64, seed=1), f32(64, seed=2), f32(6, 32, seed=3) * 3
    x[0, 0] = 0  # a block whose scale is 0
    cos, sin = np.cos(angles), np.sin(angles)
    pages, slots = np.array([3, 3, 0, 2, 0, 2]), np.array([63, 0, 5, 6, 4, 7])
    device = on_device(x, weight, cos, sin, pages, slots)
    store_arguments = {"planes": tuple(store.layers[1].key_planes), "pages": device[4], "slots": device[5]}
    _, heads = parts_of_rows(f32(6, 5, 64, seed=4), x)
    small_steps.norm_rope_and_store(heads, device[1], EPS, device[2], device[3], style, **store_arguments)
    expected = norm_and_rope(x, weight, cos, sin, style)
    keys = store.layers[1].keys(torch.arange(4), 256).reshape(4, 64, 3, 64).numpy()
    actual = keys[pages, slots]
    step = {"f32": 1e-6, "f16": 2.0**-11 * np.abs(expected).max(), "q8_0": np.abs(expected).max() / 127}[kv_type]
    np.testing.assert_allclose(actual, codec.decode(codec.encode(expected)), atol=1.01 * step + 1e-6)
    if kv_type == "q8_0":
        assert np.abs(actual - expected).max() < 0.51 * step, "codes are not the nearest"
    keys[pages, slots] = 0
    assert not keys.any()
    assert not store.layers[1].values(torch.arange(4), 256).any()
    assert not store.layers[0].keys(torch.arange(4), 256).any()


def test_wrong_arguments_are_refused():
    x, cos = torch.zeros(2, 3, 8), torch.zeros(2, 4)
    calls = [
        lambda: small_steps.silu_mul(x[0], x[1, :2]),
        lambda: small_steps.silu_mul(x[0].double(), x[1].double()),
        lambda: small_steps.silu_mul(x[0].T, x[1].T),
        lambda: small_steps.rms_norm(x[:, 0], torch.zeros(8), EPS),
        lambda: small_steps.norm_and_rope(x, None, EPS, torch.zeros(2, 5), torch.zeros(2, 5), RopeStyle.INTERLEAVED),
        lambda: small_steps.norm_and_rope(x, torch.zeros(7), EPS, cos, cos, RopeStyle.INTERLEAVED),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="accepted: "):
            call()
