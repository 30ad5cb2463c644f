"""The reference kernels against float64 arithmetic, one value at a time, and against mathematical properties."""

from __future__ import annotations

import gc
import math
import tracemalloc

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from slm_core.architectures import RopeStyle
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgmlType
from slm_core.quant import QuantizedTensor
from slm_native.kernels import reference
from slm_native.kernels.reference import ReferenceKernels

ROUNDING = 2.0**-24  # relative, of one float32 operation


def f32(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def quantized(weights: NDArray[np.float32], name: str, tensor_name: str = "w") -> QuantizedTensor:
    data = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
    return QuantizedTensor(tensor_name, weights.shape, GgmlType[name], data.view(np.uint8).reshape(-1))


def exact(tensor: QuantizedTensor) -> NDArray[np.float64]:
    rows = tensor.data.reshape(tensor.shape[0], -1)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(tensor.ggml_type)).astype(np.float64)


def assert_is_product(
    y: NDArray[np.float32], x: NDArray[np.float32], w: NDArray[np.float64], bias: NDArray[np.float32] | float = 0.0
) -> None:
    """The error is within n float32 products summed in any order: n + 1 roundings of the sum of magnitudes."""
    expected = x.astype(np.float64) @ w.T + bias
    bound = (w.shape[1] + 2) * ROUNDING * (np.abs(x.astype(np.float64)) @ np.abs(w.T) + np.abs(bias))
    assert y.dtype == np.float32
    assert y.shape == expected.shape
    worst = np.max(np.abs(y - expected) / bound)
    assert worst <= 1, f"off by {worst:.2f} times the bound of float32 rounding"


@pytest.mark.parametrize("n_tokens", [0, 1, 7])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q4_0", "TQ2_0"])
def test_matmul(name: str, n_tokens: int) -> None:
    kernels = ReferenceKernels()
    tensor = quantized(f32(37, 512, seed=1), name)
    x, bias = f32(n_tokens, 512, seed=2), f32(37, seed=3)
    weight = kernels.prepare(tensor)
    if n_tokens == 0:
        assert kernels.matmul(x, weight).shape == (0, 37)
        return
    assert_is_product(kernels.matmul(x, weight), x, exact(tensor))
    assert_is_product(kernels.matmul(x, weight, bias), x, exact(tensor), bias)


@pytest.mark.parametrize("panel_rows", [1, 5, 37, 100])
def test_matmul_in_panels(panel_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_PANEL_WEIGHTS", panel_rows * 96)
    kernels = ReferenceKernels(expanded_bytes=0)
    tensor = quantized(f32(37, 96, seed=1), "Q8_0")
    x, bias = f32(3, 96, seed=2), f32(37, seed=3)
    weight = kernels.prepare(tensor)
    assert_is_product(kernels.matmul(x, weight, bias), x, exact(tensor), bias)
    assert weight.expanded is None


def test_the_first_used_weights_are_cached_up_to_the_bound() -> None:
    tensors = [quantized(f32(8, 32, seed=i), "Q8_0") for i in range(4)]
    kernels = ReferenceKernels(expanded_bytes=2 * 8 * 32 * 4)
    weights = [kernels.prepare(tensor) for tensor in tensors]
    x = f32(2, 32, seed=9)
    for _ in range(2):
        for i in (2, 0, 1, 3):
            assert_is_product(kernels.matmul(x, weights[i]), x, exact(tensors[i]))
    assert [weight.expanded is not None for weight in weights] == [True, False, True, False]


def test_dropping_weights_frees_their_dequantized_copy() -> None:
    n_rows, n_cols = 512, 1024
    kernels = ReferenceKernels()
    weight = kernels.prepare(quantized(f32(n_rows, n_cols, seed=1), "Q8_0"))
    x = f32(1, n_cols, seed=2)
    gc.disable()  # the last reference must free it, not the garbage collector
    tracemalloc.start()
    try:
        kernels.matmul(x, weight)
        held = tracemalloc.get_traced_memory()[0]
        del weight
        freed = held - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert freed >= 4 * n_rows * n_cols


def test_prepare_copies_nothing() -> None:
    tensor = quantized(f32(64, 1024, seed=1), "Q8_0")
    tracemalloc.start()
    try:
        weight = ReferenceKernels().prepare(tensor)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.shares_memory(weight.tensor.data, tensor.data)
    assert peak < tensor.data.size // 4


@pytest.mark.parametrize(
    ("shape", "ggml_type", "n_bytes", "error", "message"),
    [
        ((32,), GgmlType.F32, 128, InvalidModelFile, "tensor 'blk.3.w' has the shape (32,), a matrix"),
        ((2, 3, 32), GgmlType.F32, 768, InvalidModelFile, "tensor 'blk.3.w' has the shape (2, 3, 32), a matrix"),
        ((2, 32), GgmlType.Q8_0, 67, InvalidModelFile, "tensor 'blk.3.w': Q8_0 weights of shape (2, 32) take 68 bytes"),
        ((2, 40), GgmlType.Q8_0, 85, InvalidModelFile, "tensor 'blk.3.w': a row of 40 weights"),
        ((1, 256), GgmlType.Q8_K, 292, UnsupportedModel, "tensor 'blk.3.w': cannot dequantize tensor type Q8_K"),
    ],
)
def test_prepare_refuses_invalid_tensors(
    shape: tuple[int, ...], ggml_type: GgmlType, n_bytes: int, error: type[Exception], message: str
) -> None:
    tensor = QuantizedTensor("blk.3.w", shape, ggml_type, np.zeros(n_bytes, np.uint8))
    with pytest.raises(error) as raised:
        ReferenceKernels().prepare(tensor)
    assert str(raised.value).startswith(message)


def test_vector() -> None:
    values = f32(48, seed=1)
    tensor = QuantizedTensor("norm", (48,), GgmlType.F32, values.view(np.uint8))
    np.testing.assert_array_equal(ReferenceKernels().vector(tensor), values)
    with pytest.raises(InvalidModelFile, match=r"^tensor 'norm': F32 weights of shape"):
        ReferenceKernels().vector(QuantizedTensor("norm", (47,), GgmlType.F32, values.view(np.uint8)))


def test_embed() -> None:
    kernels = ReferenceKernels()
    tensor = quantized(f32(11, 64, seed=1), "Q8_0")
    weight = kernels.prepare(tensor)
    token_ids = np.array([10, 3, 3, 0], np.int32)
    np.testing.assert_array_equal(kernels.embed(weight, token_ids), exact(tensor)[token_ids])
    with pytest.raises(IndexError, match="rows 0 to 10"):
        kernels.embed(weight, np.array([11], np.int32))


@pytest.mark.parametrize("shape", [(5, 96), (5, 3, 32)], ids=["rows", "heads"])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight, eps = 3 * f32(*shape, seed=1), f32(shape[-1], seed=2), 1e-5
    y = ReferenceKernels().rms_norm(x, weight, eps)
    for row, normed in zip(x.reshape(-1, shape[-1]), y.reshape(-1, shape[-1]), strict=True):
        root = math.sqrt(math.fsum(float(v) ** 2 for v in row) / len(row) + eps)
        expected = [float(v) / root * float(w) for v, w in zip(row, weight, strict=True)]
        # Half the error of the sum (pairwise, at most 8 + log2 n additions deep), then a root and two operations.
        np.testing.assert_allclose(normed, expected, rtol=12 * ROUNDING)
    assert y.dtype == np.float32


def test_rms_norm_of_zeros_is_zero() -> None:
    np.testing.assert_array_equal(ReferenceKernels().rms_norm(np.zeros((2, 8), np.float32), f32(8, seed=1), 1e-6), 0)


def angles(positions: list[int], n_pairs: int) -> NDArray[np.float64]:
    return np.outer(positions, 10000.0 ** (-np.arange(n_pairs) / n_pairs))


def rope(x: NDArray[np.float32], theta: NDArray[np.float64], style: RopeStyle) -> NDArray[np.float32]:
    return ReferenceKernels().rope(x, np.cos(theta).astype(np.float32), np.sin(theta).astype(np.float32), style)


@pytest.mark.parametrize("n_rotated", [16, 10])
def test_rope_is_a_complex_product(n_rotated: int) -> None:
    """Each pair (a, b), read as a + ib, is multiplied by exp(i theta); the dimensions that are not rotated stay."""
    x, theta = f32(3, 5, 16, seed=1), angles([0, 7, 1000], n_rotated // 2)
    factor = np.exp(1j * theta)[:, None]
    original = x.copy()
    atol = 2 * np.abs(x).max() * 3 * ROUNDING  # two products of rounded factors, and one sum

    interleaved = rope(x, theta, RopeStyle.INTERLEAVED)
    expected = (x[..., 0:n_rotated:2] + 1j * x[..., 1:n_rotated:2]) * factor
    np.testing.assert_allclose(interleaved[..., 0:n_rotated:2], expected.real, atol=atol)
    np.testing.assert_allclose(interleaved[..., 1:n_rotated:2], expected.imag, atol=atol)

    half = n_rotated // 2
    split = rope(x, theta, RopeStyle.HALF_SPLIT)
    expected = (x[..., :half] + 1j * x[..., half:n_rotated]) * factor
    np.testing.assert_allclose(split[..., :half], expected.real, atol=atol)
    np.testing.assert_allclose(split[..., half:n_rotated], expected.imag, atol=atol)

    for rotated in (interleaved, split):
        np.testing.assert_array_equal(rotated[..., n_rotated:], x[..., n_rotated:])
        np.testing.assert_array_equal(rotated[0], x[0], "position 0 must not rotate")
    np.testing.assert_array_equal(x, original, "the argument was changed")


@pytest.mark.parametrize("style", RopeStyle)
def test_products_after_rope_depend_on_the_distance_only(style: RopeStyle) -> None:
    q, k = f32(1, 2, 16, seed=1), f32(1, 2, 16, seed=2)
    products = [
        np.sum(rope(q, angles([m], 8), style) * rope(k, angles([n], 8), style)) for m, n in ((5, 2), (105, 102))
    ]
    # 32 products of rotated values, each up to sqrt(2) times an original value. Each side rounds cosine, sine, two
    # products and a sum; then one product and a sum follow.
    bound = 32 * 2 * np.abs(q).max() * np.abs(k).max() * 12 * ROUNDING
    assert abs(products[0] - products[1]) <= bound


def test_silu_mul() -> None:
    gate = np.array([-1e4, -100, -88.5, -5, -0.5, 0, 0.25, 3, 80, 1e4], np.float32)
    up = np.linspace(-3, 3, len(gate), dtype=np.float32)
    expected = [
        float(g) * float(u) / (1 + math.exp(-float(g))) if g > -700 else 0.0 for g, u in zip(gate, up, strict=True)
    ]
    np.testing.assert_allclose(ReferenceKernels().silu_mul(gate, up), expected, rtol=8 * ROUNDING, atol=1e-36)


def one_head(q: NDArray[np.float32], k: NDArray[np.float32], v: NDArray[np.float32], scale: float) -> list[float]:
    """Softmax attention of one query over all of ``k``, in float64."""
    scores = [scale * math.fsum(map(float, q * key.astype(np.float64))) for key in k]
    weights = [math.exp(score - max(scores)) for score in scores]
    return [
        math.fsum(w * float(x) for w, x in zip(weights, column, strict=True)) / math.fsum(weights) for column in v.T
    ]


@pytest.mark.parametrize(("n_tokens", "n_held"), [(1, 1), (1, 9), (6, 6), (4, 9)])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_attention(n_tokens: int, n_held: int, n_heads: int, n_kv_heads: int) -> None:
    width, scale = 8, 0.3
    q, k = 2 * f32(n_tokens, n_heads, width, seed=1), f32(n_held, n_kv_heads, width, seed=2)
    v = f32(n_held, n_kv_heads, width, seed=3)
    output = ReferenceKernels().attention(q, k, v, scale)
    assert output.dtype == np.float32
    assert output.shape == q.shape
    for token in range(n_tokens):
        n_visible = n_held - n_tokens + token + 1
        for head in range(n_heads):
            kv_head = head // (n_heads // n_kv_heads)
            expected = one_head(q[token, head], k[:n_visible, kv_head], v[:n_visible, kv_head], scale)
            # A score errs by the rounding of its sum; a weight errs twice that: in its exponential and in the total.
            largest = scale * np.max(np.abs(k[:n_visible, kv_head]) @ np.abs(q[token, head]))
            atol = np.abs(v).max() * (2 * (width + 2) * largest + n_visible + 8) * ROUNDING
            np.testing.assert_allclose(
                output[token, head], expected, atol=atol, err_msg=f"token {token}, head {head} of {n_heads}"
            )


def test_attention_with_scores_outside_the_range_of_exp() -> None:
    q = np.full((1, 1, 4), 100, np.float32)
    k = np.stack([q[0], q[0] / 2])
    v = f32(2, 1, 4, seed=1)
    np.testing.assert_array_equal(ReferenceKernels().attention(q, k, v, 1.0)[0], v[0])
