"""Operations that the cpu tier fuses, on every instruction set of this machine, against float64 compositions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from instruction_sets import every_isa
from slm_core.architectures import Activation, AnyActivation, NormKind, RopeStyle, Xielu
from slm_core.gguf import GgmlType
from slm_core.quant import QuantizedTensor, dequantize
from slm_native import _extension
from slm_native.kernels import Linear, Norm, Rotation
from slm_native.kernels.cpu import CpuKernels, CpuWeight
from slm_native.kernels.cpu.prepared import CpuPerHead
from slm_native.kernels.per_head import SteppedPerHead

if (_missing := _extension.why_missing()) is not None:
    pytest.skip(f"the C++ extension is missing: {_missing}", allow_module_level=True)

Rows = NDArray[np.float32]
every_count = pytest.mark.parametrize("n_tokens", [0, 1, 3, 8, 9, 40, 700])
CLOSE = 2e-6  # relative; float32 sums of at most 160 terms in SIMD lanes: a few roundings of 2 ** -24


def f32(*shape: int, seed: int) -> Rows:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def linear(
    kernels: CpuKernels, n_out: int, n_in: int, seed: int, bias: bool = False
) -> tuple[Linear, NDArray[np.float64]]:
    """F32 weights, which kernels do not quantize, and the same weights in float64."""
    w = f32(n_out, n_in, seed=seed)
    tensor = QuantizedTensor(f"w{seed}", w.shape, GgmlType.F32, w.reshape(-1).view(np.uint8))
    return Linear(kernels.prepare(tensor), bias=f32(n_out, seed=seed + 1) if bias else None), w.astype(np.float64)


def native_linear(kernels: CpuKernels, n_out: int, n_in: int, seed: int) -> object:
    """A linear as the C++ extension takes it."""
    prepared = linear(kernels, n_out, n_in, seed)[0].weight
    assert isinstance(prepared, CpuWeight)
    return _extension.load().Linear(prepared.packed, 1.0, None, None, None)


def rms(x: Rows, weight: Rows, eps: float) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    return wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps) * weight


def assert_close(actual: Rows, expected: NDArray[np.float64]) -> None:
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    scale = np.abs(expected).max(initial=0)
    assert np.abs(actual - expected).max(initial=0) <= CLOSE * max(scale, 1), (
        f"not close; the largest expected magnitude is {scale:.1f}"
    )


@every_isa
@every_count
@pytest.mark.parametrize("normed", [True, False])
def test_project(isa: str, n_tokens: int, normed: bool) -> None:
    kernels = CpuKernels(isa, 2, 0)
    x, weight = f32(n_tokens, 72, seed=1), f32(72, seed=2)
    norm = Norm(weight, None, NormKind.RMS, 1e-2) if normed else None
    (a, wide_a), (b, wide_b) = linear(kernels, 33, 72, 3), linear(kernels, 5, 72, 5, bias=True)
    y, z = kernels.project(x, norm, [a, b])
    wide = rms(x, weight, 1e-2) if normed else x.astype(np.float64)
    assert_close(y, wide @ wide_a.T)
    assert_close(z, wide @ wide_b.T + b.bias)


@every_isa
@pytest.mark.parametrize("n_tokens", [0, 1, 7, 600])
@pytest.mark.parametrize("kind", list(NormKind))
@pytest.mark.parametrize("shape", [(1,), (16,), (75,), (3, 24), (5, 7)])
@pytest.mark.parametrize("biased", [True, False])
def test_normed(isa: str, n_tokens: int, kind: NormKind, shape: tuple[int, ...], biased: bool) -> None:
    """Rows of any width, with one weight vector for all rows or one for each."""
    weight, x = f32(*shape, seed=1), f32(n_tokens, *shape, seed=2) + 3
    norm = Norm(weight, f32(*shape, seed=3) if biased else None, kind, 1e-3)
    wide = x.astype(np.float64)
    if kind is NormKind.LAYER:
        wide = wide - wide.mean(axis=-1, keepdims=True)
    wide = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-3) * weight
    assert_close(CpuKernels(isa, 2, 0).normed(x, norm), wide if norm.bias is None else wide + norm.bias)


def _gelu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / 2 * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))


_XIELU = Xielu(alpha_n=0.7, alpha_p=0.9, beta=0.5, eps=-1e-6)
FORMULAS: list[tuple[AnyActivation, Callable[[NDArray[np.float64]], NDArray[np.float64]]]] = [
    (Activation.SILU, lambda x: x / (1 + np.exp(-x))),
    (Activation.GELU, _gelu),
    (Activation.GELU_TANH, lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    (Activation.RELU, lambda x: np.maximum(x, 0)),
    (Activation.RELU_SQUARED, lambda x: np.maximum(x, 0) ** 2),
    (_XIELU, lambda x: np.where(x > 0, 0.9 * x**2, 0.7 * (np.expm1(np.minimum(x, -1e-6)) - x)) + 0.5 * x),
]
every_formula = pytest.mark.parametrize(("activation", "formula"), FORMULAS, ids=lambda f: getattr(f, "value", "_"))


@every_isa
@every_count
@pytest.mark.parametrize("biased", [True, False])
@every_formula
def test_gate_up(
    isa: str,
    n_tokens: int,
    biased: bool,
    activation: AnyActivation,
    formula: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> None:
    """With and without a gate."""
    kernels = CpuKernels(isa, 2, 0)
    x, weight = f32(n_tokens, 40, seed=1), f32(40, seed=2)
    (gate, wide_gate), (up, wide_up) = linear(kernels, 51, 40, 3, biased), linear(kernels, 51, 40, 5, biased)
    norm, normed = Norm(weight, None, NormKind.RMS, 1e-5), rms(x, weight, 1e-5)
    g, u = (
        normed @ wide.T + (0 if each.bias is None else each.bias) for wide, each in ((wide_gate, gate), (wide_up, up))
    )
    assert_close(kernels.gate_up(x, norm, gate, up, activation), formula(g) * u)
    assert_close(kernels.gate_up(x, norm, None, up, activation), formula(u))


@every_isa
@pytest.mark.parametrize("n_tokens", [1, 40])
def test_clamped_swiglu(isa: str, n_tokens: int) -> None:
    kernels = CpuKernels(isa, 2, 0)
    x = 6 * f32(n_tokens, 40, seed=1)  # so that each clamp is active for some values
    (gate, wide_gate), (up, wide_up) = linear(kernels, 51, 40, 3), linear(kernels, 51, 40, 5)
    g, u = np.minimum(x.astype(np.float64) @ wide_gate.T, 7), np.clip(x.astype(np.float64) @ wide_up.T, -7, 7)
    assert (g == 7).any()
    assert (abs(u) == 7).any()
    assert_close(kernels.gate_up(x, None, gate, up, Activation.SWIGLU_CLAMPED), g / (1 + np.exp(-1.702 * g)) * (u + 1))


@every_isa
@pytest.mark.parametrize("n_tokens", [1, 40])
def test_gates_above_a_threshold(isa: str, n_tokens: int) -> None:
    """Gates above the mean of their row plus 0.8 standard deviations pass, shifted by it; other gates are 0."""
    kernels = CpuKernels(isa, 2, 0)
    x = f32(n_tokens, 40, seed=1) + 0.1
    (gate, wide_gate), (up, wide_up) = linear(kernels, 51, 40, 3, bias=True), linear(kernels, 51, 40, 5)
    g = x.astype(np.float64) @ wide_gate.T + gate.bias
    g = np.maximum(g - g.mean(axis=1, keepdims=True) - 0.8 * g.std(axis=1, keepdims=True), 0)
    assert 0.05 < (g > 0).mean() < 0.5
    expected = _gelu(g) * (x.astype(np.float64) @ wide_up.T)
    assert_close(kernels.gate_up(x, None, gate, up, Activation.GELU, threshold=0.8), expected)
    with pytest.raises(ValueError, match="a threshold without a gate"):
        kernels.gate_up(x, None, None, up, Activation.GELU, threshold=0.8)


@every_isa
@pytest.mark.parametrize("n_tokens", [0, 1, 7, 300])
@pytest.mark.parametrize("width", [1, 33, 64])
def test_shares_are_added_to_residual_streams(isa: str, n_tokens: int, width: int) -> None:
    arrays, shares = [f32(n_tokens, width, seed=i) for i in range(3)], f32(n_tokens, 9, seed=4)
    actual = CpuKernels(isa, 2, 0).add_shares(arrays, shares)
    streams = np.stack(arrays, axis=1).astype(np.float64)  # [T, N, width]
    expected = streams + shares.reshape(-1, 3, 3).astype(np.float64) @ streams
    for i, each in enumerate(actual):
        assert_close(each, expected[:, i])


@every_isa
@pytest.mark.parametrize("shape", [(0, 5), (1, 33), (3, 2, 700)])
@every_formula
def test_activations_without_products(
    isa: str,
    shape: tuple[int, ...],
    activation: AnyActivation,
    formula: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> None:
    kernels, gate, up = CpuKernels(isa, 2, 0), f32(*shape, seed=1), f32(*shape, seed=2)
    expected = formula(gate.astype(np.float64))
    assert_close(kernels.activate(gate, activation), expected)
    assert_close(kernels.gated(gate, up, activation), expected * up)


@every_isa
@pytest.mark.parametrize("n_tokens", [1, 40])
def test_products_are_scaled_before_the_bias_is_added(isa: str, n_tokens: int) -> None:
    kernels = CpuKernels(isa, 2, 0)
    x, residual = f32(n_tokens, 72, seed=1), f32(n_tokens, 33, seed=2)
    plain, wide = linear(kernels, 33, 72, 3, bias=True)
    scaled = replace(plain, scale=np.array([0.37], np.float32))
    expected = (x.astype(np.float64) @ wide.T) * np.float64(np.float32(0.37)) + plain.bias
    assert_close(kernels.project(x, None, [scaled])[0], expected)
    assert_close(kernels.add_product(residual, x, scaled), expected + residual)


@every_isa
@every_formula
def test_activations_of_large_inputs(
    isa: str, activation: AnyActivation, formula: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> None:
    """Within some roundings of 2 ** -24 of the formula if it is finite: relative above 1, absolute below."""
    values = np.concatenate([np.linspace(-80, 80, 4001), [0.0, -0.0, 1e-30, -1e-30, -1e4, 1e4]]).astype(np.float32)
    kernels, one = CpuKernels(isa, 1, 0), np.ones((1, 1), np.float32)
    tensor = QuantizedTensor("w", (len(values), 1), GgmlType.F32, values.view(np.uint8))
    y = kernels.gate_up(one, None, None, Linear(kernels.prepare(tensor)), activation)[0]
    with np.errstate(over="ignore"):
        expected = formula(values.astype(np.float64))
    np.testing.assert_allclose(y, expected, rtol=6e-7, atol=1e-6)


@every_isa
@every_count
@pytest.mark.parametrize("bias", [True, False])
def test_add_product(isa: str, n_tokens: int, bias: bool) -> None:
    kernels = CpuKernels(isa, 2, 0)
    x, residual = f32(n_tokens, 160, seed=1), f32(n_tokens, 19, seed=2)
    before = residual.copy()
    down, wide = linear(kernels, 19, 160, 3, bias)
    y = kernels.add_product(residual, x, down)
    assert_close(y, residual + x.astype(np.float64) @ wide.T + (0 if down.bias is None else down.bias))
    np.testing.assert_array_equal(residual, before, "the residual was written")


@every_isa
@pytest.mark.parametrize("n_tokens", [1, 5, 600])
@pytest.mark.parametrize("style", list(RopeStyle))
@pytest.mark.parametrize(("width", "rotated"), [(8, 8), (24, 24), (24, 16), (80, 80), (128, 128)])
@pytest.mark.parametrize("normed", ["", "a head", "each head", "all"])
def test_heads(isa: str, n_tokens: int, style: RopeStyle, width: int, rotated: int, normed: str) -> None:
    """RoPE rotates pairs of values: as complex numbers they are multiplied by exp(i angle)."""
    kernels = CpuKernels(isa, 2, 0)
    shapes = {"": (width,), "a head": (width,), "each head": (3, width), "all": (3 * width,)}
    flat, weight = f32(n_tokens, 3 * width, seed=1), f32(*shapes[normed], seed=2)
    angles = np.random.default_rng(3).uniform(-9, 9, (n_tokens, rotated // 2))
    rotation = Rotation(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), style)
    norm = Norm(weight, None, NormKind.RMS, 1e-6) if normed else None
    wide = flat.reshape(n_tokens, 3, width).astype(np.float64)
    if normed:
        norm_input = flat if normed == "all" else wide.astype(np.float32)
        wide = rms(norm_input, weight, 1e-6).reshape(n_tokens, 3, width)
    first, second = slice(0, rotated // 2), slice(rotated // 2, rotated)
    if style is RopeStyle.INTERLEAVED:
        first, second = slice(0, rotated, 2), slice(1, rotated, 2)
    rotated_pairs = (wide[..., first] + 1j * wide[..., second]) * np.exp(1j * angles)[:, None]
    wide[..., first], wide[..., second] = rotated_pairs.real, rotated_pairs.imag
    assert_close(kernels.heads(flat, width, norm, rotation), wide)


@every_isa
def test_silu_over_its_whole_range(isa: str) -> None:
    """Within four units in the last place, and equal to the limit for infinite inputs."""
    gate = np.concatenate([np.linspace(-80, 80, 4001), [0.0, -0.0, 1e-30, -1e-30, 200.0, -200.0, np.inf]])
    x = np.ones((1, 1), np.float32)
    kernels = CpuKernels(isa, 1, 0)
    weights = [gate.astype(np.float32), np.ones(len(gate), np.float32)]
    tensors = [QuantizedTensor("w", (len(gate), 1), GgmlType.F32, w.view(np.uint8)) for w in weights]
    y = kernels.gate_up(x, None, *(Linear(kernels.prepare(t)) for t in tensors), Activation.SILU)[0]
    wide = gate.astype(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        expected = wide / (1 + np.exp(-wide))
    assert np.isposinf(y[-1])
    np.testing.assert_allclose(y[:-1], expected[:-1], rtol=4 * 2.0**-23, atol=1e-33)
    nan = np.full((1, 1), np.nan, np.float32)
    assert np.isnan(kernels.gate_up(nan, None, *(Linear(kernels.prepare(t)) for t in tensors), Activation.SILU)).all()


@every_isa
def test_norms_are_fused_with_quantized_products(isa: str) -> None:
    """The product of normalized activations, within the rounding of activations to int8."""
    kernels = CpuKernels(isa, 2, 0)
    blocks = np.random.default_rng(1).integers(0, 256, (48 * 3, 34), dtype=np.uint8)
    blocks[:, 0:2] = np.array([0.01], np.float16).view(np.uint8)
    w = kernels.prepare(QuantizedTensor("w", (48, 96), GgmlType.Q8_0, blocks.reshape(-1)))
    x, weight = f32(4, 96, seed=2), f32(96, seed=3)
    norm = Norm(weight, None, NormKind.RMS, 1e-5)
    (y,) = kernels.project(x, norm, [Linear(w)])
    wide = dequantize(blocks.reshape(-1), GgmlType.Q8_0, (48, 96)).astype(np.float64)
    normed = rms(x, weight, 1e-5)
    steps = np.abs(normed.reshape(4, 3, 32)).max(axis=-1).repeat(32, axis=-1).reshape(4, 96) / 127
    bound = (steps / 2 + 1e-6) @ np.abs(wide).T  # half a step of int8 for each activation
    assert (np.abs(y - normed @ wide.T) <= 1.01 * bound).all()


@every_isa
def test_mismatched_arguments_are_refused(isa: str) -> None:
    native = _extension.load()
    kernels = native.Kernels(isa, 1)
    cpu = CpuKernels(isa, 1, 0)
    w, other, silu = native_linear(cpu, 3, 8, 1), native_linear(cpu, 4, 16, 1), native.Activation.of("silu", [])
    x, norm = f32(2, 8, seed=2), native.Norm.of(f32(7, seed=3), None, 1e-5, False)
    with pytest.raises(ValueError, match="norm has 7 numbers, not 8"):
        kernels.project(x, norm, [w])
    with pytest.raises(ValueError, match="x has rows of 8, the norm takes 7"):
        kernels.normalize(x, norm)
    with pytest.raises(ValueError, match="weight and bias differ in shape"):
        native.Norm.of(f32(7, seed=3), f32(8, seed=3), 1e-5, False)
    with pytest.raises(ValueError, match="no kernel for the activation 'tanh'"):
        native.Activation.of("tanh", [])
    with pytest.raises(ValueError, match="wrong number of parameters of the activation xielu"):
        native.Activation.of("xielu", [1.0])
    with pytest.raises(ValueError, match="rows of different widths"):
        kernels.project(x, None, [w, other])
    with pytest.raises(ValueError, match="gate and up have different shapes"):
        kernels.gate_up(x, None, other, w, silu, None)
    with pytest.raises(ValueError, match="swiglu_clamped without a gate"):
        kernels.gate_up(x, None, None, w, native.Activation.of("swiglu_clamped", []), None)
    with pytest.raises(ValueError, match=r"residual has the shape \[2, 4\], the product \[2, 3\]"):
        kernels.add_product(f32(2, 4, seed=3), x, w)
    with pytest.raises(ValueError, match="not a multiple of the head width 3"):
        kernels.rotate_heads(x, 3, None, None, None, False)
    with pytest.raises(ValueError, match="norm must have the width of one head"):
        kernels.rotate_heads(x, 4, norm, None, None, False)
    with pytest.raises(ValueError, match="cos and sin must be"):
        kernels.rotate_heads(x, 4, None, f32(1, 2, seed=3), f32(1, 2, seed=3), False)
    with pytest.raises(TypeError, match="cos must be float32"):
        kernels.rotate_heads(x, 4, None, np.ones((2, 2)), f32(2, 2, seed=3), False)


@every_isa
@pytest.mark.parametrize("n_tokens", [0, 1, 5, 33])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_one_matrix_per_head(isa: str, n_tokens: int, n_threads: int) -> None:
    kernels = CpuKernels(isa, n_threads, 0)
    x, linears = f32(n_tokens, 6, 40, seed=1), [linear(kernels, 24, 40, i) for i in range(6)]
    per_head = kernels.per_head([each for each, _ in linears])
    assert isinstance(per_head, CpuPerHead)
    assert_close(
        per_head.run(x), np.einsum("thi,hoi->tho", x.astype(np.float64), np.array([wide for _, wide in linears]))
    )
    with pytest.raises(ValueError, match="there must be one matrix per head"):
        per_head.run(f32(2, 5, 40, seed=1))
    biased = kernels.per_head([linear(kernels, 24, 40, i, bias=True)[0] for i in range(6)])
    assert isinstance(biased, SteppedPerHead), "the C++ kernel has no biases"
    assert biased.run(f32(2, 6, 40, seed=1)).shape == (2, 6, 24)
