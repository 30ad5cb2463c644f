"""MoE layers of the cpu tier, on every instruction set of this machine.

The oracle of routing is the reference kernel set. The oracle of experts is float64 or, if activations are rounded, the
unfused steps of the cpu tier, which have tests of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from numpy.typing import NDArray

from instruction_sets import every_isa
from random_matrices import random_matrix
from slm_core.architectures import Activation, ExpertsSpec, Gating, NormKind
from slm_core.gguf import GgmlType
from slm_core.quant import QuantizedTensor, dequantize
from slm_native import _extension
from slm_native.kernels import Experts, FeedForward, Linear, Norm
from slm_native.kernels.cpu import CpuKernels
from slm_native.kernels.moe import MoeLayer, SteppedMoe, route

if (_missing := _extension.why_missing()) is not None:
    pytest.skip(f"the C++ extension is missing: {_missing}", allow_module_level=True)

from slm_native.kernels.cpu.prepared import CpuMoe

Rows = NDArray[np.float32]
Wide = NDArray[np.float64]
every_count = pytest.mark.parametrize("n_tokens", [0, 1, 3, 8, 40, 150])
WIDTH, N_FF, N_SHARED_FF, N_EXPERTS, N_USED = 72, 40, 56, 7, 3
CLOSE = 4e-6  # relative; three consecutive float32 sums of at most 72 terms: a few roundings of 2 ** -24
WEIGHTS_CLOSE = 1e-6  # relative, of expert weights: exponentials, a sum of at most 24 of them, and a quotient


def f32(*shape: int, seed: int) -> Rows:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def linear(kernels: CpuKernels, w: Rows, bias: Rows | None = None, scale: Rows | None = None) -> Linear:
    tensor = QuantizedTensor("w", w.shape, GgmlType.F32, np.ascontiguousarray(w).reshape(-1).view(np.uint8))
    return Linear(kernels.prepare(tensor), scale, bias)


def cpp_moe(kernels: CpuKernels, experts: Experts) -> MoeLayer:
    moe = kernels.moe(experts)
    assert isinstance(moe, CpuMoe), "the tier composed the layer of steps"
    return moe


# --- routing: expert i returns the unit vector i, so that the output is the weight of every expert


def routing_weights(spec: ExpertsSpec, scores: Rows, bias: Rows | None = None) -> Rows:
    kernels, n = CpuKernels(None, 2, 0), spec.n_experts
    ups, downs = np.zeros((1, n), np.float32), np.zeros((n, 1), np.float32)
    experts = [
        FeedForward(None, linear(kernels, ups), linear(kernels, downs, np.eye(n, dtype=np.float32)[i]))
        for i in range(n)
    ]
    router = linear(kernels, np.eye(n, dtype=np.float32))
    return cpp_moe(kernels, Experts(spec, router, bias, experts, Activation.RELU)).run(scores, None)


def expected_weights(spec: ExpertsSpec, scores: Rows, bias: Rows | None = None) -> Rows:
    routes = route(scores, spec, bias)
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, routes.experts, routes.weights, axis=1)
    return weights


@pytest.mark.parametrize("n_tokens", [1, 500])
@pytest.mark.parametrize("gating", Gating)
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("n_experts", "n_used", "n_groups", "n_groups_used"), [(7, 3, 1, 1), (24, 5, 6, 2), (4, 4, 4, 4)]
)
def test_routing(
    n_tokens: int,
    gating: Gating,
    normalized: bool,
    biased: bool,
    n_experts: int,
    n_used: int,
    n_groups: int,
    n_groups_used: int,
) -> None:
    spec = ExpertsSpec(n_experts, n_used, gating, normalized, 1.5, False, n_groups, n_groups_used)
    scores, bias = f32(n_tokens, n_experts, seed=n_experts), f32(n_experts, seed=1) if biased else None
    if gating is Gating.SPARSE_MIXER:
        scores = 3 + np.float32(0.05) * scores  # so that some scores are within 2 % of others
    if gating is Gating.SOFTMAX_OF_CHOSEN or gating is Gating.SPARSE_MIXER:
        scores = abs(scores)  # non-negative, so that the sum of weights is not near 0
    actual, expected = routing_weights(spec, scores, bias), expected_weights(spec, scores, bias)
    np.testing.assert_array_equal(actual != 0, expected != 0, "other experts were selected")
    np.testing.assert_allclose(actual, expected, rtol=WEIGHTS_CLOSE)


@pytest.mark.parametrize("gating", [Gating.SOFTMAX, Gating.SIGMOID])
@pytest.mark.parametrize("n_groups", [1, 4])
def test_the_first_of_equal_scores_is_selected(gating: Gating, n_groups: int) -> None:
    spec = ExpertsSpec(12, 4, gating, normalized=False, n_groups=n_groups, n_groups_used=min(n_groups, 2))
    scores = np.random.default_rng(1).integers(0, 3, (300, 12)).astype(np.float32)
    actual, expected = routing_weights(spec, scores), expected_weights(spec, scores)
    np.testing.assert_array_equal(actual != 0, expected != 0)
    np.testing.assert_allclose(actual, expected, rtol=WEIGHTS_CLOSE)


def test_nan_and_infinite_scores_select_existing_experts() -> None:
    spec = ExpertsSpec(12, 4, Gating.SIGMOID, normalized=True, n_groups=4, n_groups_used=2)
    scores = np.full((40, 12), np.nan, np.float32)
    scores[20:, ::2] = np.inf
    assert np.isnan(routing_weights(spec, scores)[:20]).any(axis=1).all()


# --- experts


class Layer:
    """An MoE layer with F32 weights, and its output in float64."""

    def __init__(
        self, kernels: CpuKernels, activation: Activation, gated: bool, shared: bool, biased: bool, scales_input: bool
    ) -> None:
        self._kernels, self._seed, self._biased = kernels, 100, biased
        self.activation = activation
        spec = ExpertsSpec(N_EXPERTS, N_USED, Gating.SOFTMAX, normalized=True, scales_input=scales_input)
        self.experts = Experts(
            spec,
            replace(self._linear(N_EXPERTS, WIDTH), scale=None),
            None,
            [self._feed_forward(N_FF, gated) for _ in range(N_EXPERTS)],
            activation,
            self._feed_forward(N_SHARED_FF, gated) if shared else None,
            self._linear(1, WIDTH) if shared else None,
        )

    def _linear(self, n_out: int, n_in: int) -> Linear:
        self._seed += 1
        w = f32(n_out, n_in, seed=self._seed) / np.float32(np.sqrt(n_in))
        if not self._biased:
            return linear(self._kernels, w)
        return linear(self._kernels, w, f32(n_out, seed=-self._seed % 1000), np.float32([0.5 + self._seed % 3]))

    def _feed_forward(self, n_ff: int, gated: bool) -> FeedForward:
        gate = self._linear(n_ff, WIDTH) if gated else None
        return FeedForward(gate, self._linear(n_ff, WIDTH), self._linear(WIDTH, n_ff))

    def expected_output(self, x: Rows, norm: Norm | None, router_input: Rows | None) -> Wide:
        normed = x.astype(np.float64)
        if norm is not None:
            normed = normed / np.sqrt(np.mean(normed**2, axis=-1, keepdims=True) + norm.eps) * norm.weight
        scores = apply_linear(normed if router_input is None else router_input.astype(np.float64), self.experts.router)
        routes, output = route(scores.astype(np.float32), self.experts.spec, None), np.zeros(x.shape)
        for t in range(len(x)):
            for expert, weight in zip(routes.experts[t], routes.weights[t].astype(np.float64), strict=True):
                input_scale, output_scale = (weight, 1) if self.experts.spec.scales_input else (1, weight)
                output[t] += output_scale * self._expert_output(normed[t] * input_scale, self.experts.experts[expert])
            if self.experts.shared is not None and self.experts.shared_gate is not None:
                share = 1 / (1 + np.exp(-apply_linear(normed[t], self.experts.shared_gate)))
                output[t] += share * self._expert_output(normed[t], self.experts.shared)
        return output

    def _expert_output(self, x: Wide, weights: FeedForward) -> Wide:
        inner = apply_linear(x, weights.up)
        if weights.gate is None:
            inner = np.maximum(inner, 0)
        elif self.activation is Activation.SILU:
            gate = apply_linear(x, weights.gate)
            inner = gate / (1 + np.exp(-gate)) * inner
        else:
            gate = np.minimum(apply_linear(x, weights.gate), 7)
            inner = gate / (1 + np.exp(-1.702 * gate)) * (np.clip(inner, -7, 7) + 1)
        return apply_linear(inner, weights.down)


def apply_linear(x: Wide, weights: Linear) -> Wide:
    tensor = weights.weight.tensor
    y: Wide = x @ dequantize(tensor.data, tensor.ggml_type, tensor.shape).T.astype(np.float64)
    y = y if weights.scale is None else y * weights.scale
    return y if weights.bias is None else y + weights.bias


@every_isa
@every_count
@pytest.mark.parametrize(
    ("activation", "gated", "shared", "biased", "scales_input"),
    [
        (Activation.SILU, True, False, False, False),
        (Activation.SILU, True, True, False, False),
        (Activation.SWIGLU_CLAMPED, True, False, True, False),
        (Activation.SILU, True, True, True, True),
        (Activation.RELU, False, True, True, False),
    ],
)
def test_experts(
    isa: str, n_tokens: int, activation: Activation, gated: bool, shared: bool, biased: bool, scales_input: bool
) -> None:
    x, router_input, norm = inputs_of_experts(n_tokens, gated, biased)
    before = x.copy()
    expected = expected_of_experts(n_tokens, activation, gated, shared, biased, scales_input)
    for n_threads in (1, 2, 3):
        kernels = CpuKernels(isa, n_threads, 0)
        layer = Layer(kernels, activation, gated=gated, shared=shared, biased=biased, scales_input=scales_input)
        actual = cpp_moe(kernels, layer.experts).run(x, norm, router_input)
        assert actual.shape == expected.shape
        error = np.abs(actual - expected).max(initial=0)
        assert error <= CLOSE * np.abs(expected).max(initial=1), f"with {n_threads} threads"
        np.testing.assert_array_equal(x, before, "the input was overwritten")


def inputs_of_experts(n_tokens: int, gated: bool, biased: bool) -> tuple[Rows, Rows | None, Norm | None]:
    router_input = f32(n_tokens, WIDTH, seed=2) if biased else None
    norm = Norm(f32(WIDTH, seed=3), None, NormKind.RMS, 1e-3) if gated else None
    return f32(n_tokens, WIDTH, seed=1), router_input, norm


@lru_cache(maxsize=1)
def expected_of_experts(
    n_tokens: int, activation: Activation, gated: bool, shared: bool, biased: bool, scales_input: bool
) -> Wide:
    """Output in float64: the same for each instruction set."""
    layer = Layer(CpuKernels("scalar", 1, 0), activation, gated, shared, biased, scales_input)
    x, router_input, norm = inputs_of_experts(n_tokens, gated, biased)
    return layer.expected_output(x, norm, router_input)


TYPES = [
    (GgmlType.Q8_0, GgmlType.Q8_0, GgmlType.Q8_0),
    (GgmlType.Q4_K, GgmlType.Q4_K, GgmlType.Q6_K),
    (GgmlType.MXFP4, GgmlType.MXFP4, GgmlType.MXFP4),
    (GgmlType.Q4_0, GgmlType.Q5_1, GgmlType.F16),
]


@every_isa
@pytest.mark.parametrize("n_tokens", [1, 5, 33, 150])
@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(each.name for each in types))
def test_quantized_experts_equal_their_steps(isa: str, n_tokens: int, types: Sequence[GgmlType]) -> None:
    """Fused and unfused products round activations alike; only expert weights differ, in their last bits."""
    kernels, width, n_ff = CpuKernels(isa, 2, 0), 512, 256

    def quantized_linear(ggml_type: GgmlType, n_out: int, n_in: int, seed: int) -> Linear:
        matrix = random_matrix(ggml_type, n_out, n_in, seed)
        return Linear(kernels.prepare(QuantizedTensor("w", matrix.shape, matrix.ggml_type, matrix.data)))

    def feed_forward(seed: int, n_inner: int) -> FeedForward:
        gate, up, down = types
        return FeedForward(
            quantized_linear(gate, n_inner, width, seed),
            quantized_linear(up, n_inner, width, seed + 50),
            quantized_linear(down, width, n_inner, seed + 99),
        )

    experts = Experts(
        ExpertsSpec(20, 4, Gating.SOFTMAX, normalized=True),
        linear(kernels, f32(20, width, seed=1)),
        None,
        [feed_forward(i, n_ff) for i in range(20)],
        Activation.SILU,
        feed_forward(20, 2 * n_ff),
    )
    x = f32(n_tokens, width, seed=2)
    actual, expected = cpp_moe(kernels, experts).run(x, None), SteppedMoe(kernels, kernels, experts).run(x, None)
    assert np.abs(actual - expected).max() <= 5 * WEIGHTS_CLOSE * np.abs(expected).max()


@every_isa
def test_each_part_of_a_layer_changes_the_output(isa: str) -> None:
    kernels = CpuKernels(isa, 2, 0)
    experts = Layer(kernels, Activation.SILU, gated=True, shared=True, biased=True, scales_input=False).experts
    x, router_input = f32(9, WIDTH, seed=1), f32(9, WIDTH, seed=2)
    assert experts.shared is not None
    whole, first = cpp_moe(kernels, experts).run(x, None), experts.experts[0]
    others = [
        replace(experts, selection_bias=f32(N_EXPERTS, seed=3)),
        replace(experts, shared=None, shared_gate=None),
        replace(experts, shared_gate=None),
        replace(experts, activation=Activation.GELU),
        replace(experts, spec=replace(experts.spec, scale=2.0)),
        replace(experts, spec=replace(experts.spec, scales_input=True)),
        replace(experts, experts=[first] * N_EXPERTS),
        replace(experts, experts=[replace(each, gate=None) for each in experts.experts]),
        replace(experts, experts=[replace(each, down=replace(each.down, bias=None)) for each in experts.experts]),
        replace(experts, experts=[replace(each, up=replace(each.up, scale=None)) for each in experts.experts]),
    ]
    for other in others:
        assert not np.allclose(cpp_moe(kernels, other).run(x, None), whole, rtol=1e-3)
    assert not np.allclose(cpp_moe(kernels, experts).run(x, None, router_input), whole, rtol=1e-3)


@every_isa
def test_a_layer_with_a_type_without_kernels_is_composed_of_steps(isa: str) -> None:
    kernels = CpuKernels(isa, 2, 0)
    experts = Layer(kernels, Activation.SILU, gated=True, shared=False, biased=False, scales_input=False).experts
    iq = random_matrix(GgmlType.IQ2_XS, N_EXPERTS, 256, 1)
    router = Linear(kernels.prepare(QuantizedTensor("iq", iq.shape, iq.ggml_type, iq.data)))
    assert isinstance(kernels.moe(replace(experts, router=router)), SteppedMoe)


@every_isa
def test_mismatched_arguments_are_refused(isa: str) -> None:
    kernels = CpuKernels(isa, 1, 0)
    experts = Layer(kernels, Activation.SILU, gated=True, shared=False, biased=False, scales_input=False).experts
    x, moe = f32(2, WIDTH, seed=1), kernels.moe(experts)
    with pytest.raises(ValueError, match="x has rows of 71, the experts take 72"):
        moe.run(x[:, :71], None)
    with pytest.raises(ValueError, match="norm has 71 numbers, not 72"):
        moe.run(x, Norm(f32(71, seed=1), None, NormKind.RMS, 1e-5))
    with pytest.raises(ValueError, match="router_input and x differ in shape"):
        moe.run(x, None, x[:1])
    with pytest.raises(ValueError, match=r"down is \[40, 72\], not \[72, 40\]"):
        kernels.moe(replace(experts, experts=[replace(each, down=each.up) for each in experts.experts]))
    with pytest.raises(ValueError, match="one matrix per expert"):
        kernels.moe(replace(experts, experts=experts.experts[:-1]))
    with pytest.raises(ValueError, match="selection_bias has 3 numbers, not 7"):
        kernels.moe(replace(experts, selection_bias=f32(3, seed=1)))
    with pytest.raises(ValueError, match="swiglu_clamped without a gate"):
        ungated = [replace(each, gate=None) for each in experts.experts]
        kernels.moe(replace(experts, activation=Activation.SWIGLU_CLAMPED, experts=ungated))
    with pytest.raises(ValueError, match="from 1 to the number of experts"):
        kernels.moe(replace(experts, spec=replace(experts.spec, n_used=8)))
    with pytest.raises(ValueError, match="n_groups must divide the number of experts"):
        kernels.moe(replace(experts, spec=replace(experts.spec, n_groups=2, n_groups_used=1)))
