"""Recurrent layers in C++, on every instruction set of this machine, against their composition of NumPy steps.

Sizes are no multiples of SIMD vectors, of blocks of four rows and of the rows per thread. Weights are F32, which
kernels do not quantize: only float32 rounding remains. Sums of at most 200 products differ by about 1e-6 of the largest
term. The operations after them (decays, norms, gates) multiply this error by a few at most. States pass it from token
to token without growth, because they decay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from instruction_sets import every_isa
from slm_core.architectures import Mamba2Spec, MambaSpec, NormKind, Rwkv7Spec
from slm_core.gguf import GgmlType
from slm_core.quant import QuantizedTensor
from slm_native import _extension
from slm_native.kernels import (
    ChannelMix,
    KernelSet,
    Linear,
    LowRank,
    Mamba,
    Mamba2,
    Norm,
    RecurrentWeights,
    Rwkv7,
    RwkvBlock,
    ShortConv,
)
from slm_native.kernels.cpu import CpuKernels
from slm_native.kernels.cpu.fusion import CpuRwkvLayers
from slm_native.kernels.reference import ReferenceKernels
from slm_native.kernels.rwkv import RwkvState
from slm_native.steps import RwkvStep

if (_missing := _extension.why_missing()) is not None:
    pytest.skip(f"the C++ extension is missing: {_missing}", allow_module_level=True)

Floats = NDArray[np.float32]
CLOSE = 2e-5
every_batch = pytest.mark.parametrize(("n_seqs", "n_tokens"), [(1, 1), (1, 9), (3, 2), (2, 41)])
every_size = pytest.mark.parametrize("size", [0.0, 1.0, 30.0])
N_THREADS = 3


class RandomArrays:
    """Random numbers; each call returns new ones."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Floats:
        return np.float32(scale) * self._rng.standard_normal(shape, np.float32)

    def linear(self, kernels: KernelSet, n_out: int, n_in: int, *, bias: bool = False) -> Linear:
        w = self(n_out, n_in, scale=n_in**-0.5)
        tensor = QuantizedTensor("w", w.shape, GgmlType.F32, w.reshape(-1).view(np.uint8))
        return Linear(kernels.prepare(tensor), bias=self(n_out) if bias else None)

    def norm(self, *shape: int) -> Norm:
        return Norm(1 + self(*shape, scale=0.2), None, NormKind.RMS, 1e-5)


def assert_equal_on_cpu_and_reference(isa: str, run: Callable[[KernelSet], tuple[Floats, ...]]) -> None:
    """The results of a layer in C++ equal those of its composition in NumPy."""
    actual, expected = run(CpuKernels(isa, N_THREADS, 0)), run(ReferenceKernels())
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.dtype == np.float32
        assert one.shape == other.shape
        worst = np.abs(one.astype(np.float64) - other).max(initial=0)
        limit = CLOSE * max(1.0, np.abs(other).max(initial=0))
        assert worst <= limit, f"result {i}: off by {worst:.2e}, at most {limit:.2e}"


def run_without_changes(arrays: list[Floats], run: Callable[..., tuple[Floats, ...]]) -> tuple[Floats, ...]:
    """The results of ``run``, which must not change its arguments."""
    before = [array.copy() for array in arrays]
    results = run(*arrays)
    for array, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, copy, "a step changed its argument")
    return results


@every_isa
@every_batch
@pytest.mark.parametrize(
    ("n_groups", "n_heads", "width", "n_state", "n_rates"),
    [(1, 37, 1, 16, 16), (1, 70, 1, 21, 21), (3, 6, 5, 12, 1), (1, 3, 21, 32, 1), (2, 2, 3, 7, 7), (5, 5, 1, 1, 1)],
)
def test_scans(
    isa: str, n_seqs: int, n_tokens: int, n_groups: int, n_heads: int, width: int, n_state: int, n_rates: int
) -> None:
    random = RandomArrays(1)
    arguments = [
        random(n_seqs, n_tokens, n_heads, width),
        random(n_seqs, n_tokens, n_heads, scale=5),
        -np.exp(random(n_heads, n_rates)),
        random(n_seqs, n_tokens, n_groups, n_state),
        random(n_seqs, n_tokens, n_groups, n_state),
        random(n_seqs, n_heads, width, n_state),
    ]
    assert_equal_on_cpu_and_reference(isa, lambda kernels: run_without_changes(arguments, kernels.selective_scan))


@every_isa
@pytest.mark.parametrize("n_state", [1, 16, 19])
def test_decays_and_steps_of_any_size(isa: str, n_state: int) -> None:
    """Rates decay a state of ones, steps drive a state of zeros: both within a few units in the last place.

    The rounding of an exponent e, |e| 2⁻²⁴, becomes the relative error of exp(e): hence 1e-7 per unit of the exponent.
    Results below exp(-87) = 1.7e-38 may become zero.
    """
    kernels = CpuKernels(isa, 1, 0)
    exponents = -np.concatenate([np.geomspace(1e-6, 120, 300), [0, 86, 87, 87.3, 88, 500]]).astype(np.float32)
    n = len(exponents)
    step = np.full((1, 1, n), np.log(np.expm1(1.0)), np.float32)  # softplus gives 1
    rates = np.repeat(exponents[:, None], n_state, 1)
    zero = np.zeros((1, 1, 1, n_state), np.float32)
    x = np.zeros((1, 1, n, 1), np.float32)
    _, state = kernels.selective_scan(x, step, rates, zero, zero, np.ones((1, n, 1, n_state), np.float32))
    expected = np.exp(rates.astype(np.float64))
    bound = (4e-7 + 3e-7 * np.abs(rates)) * expected + 1.7e-38
    assert (np.abs(state[0, :, 0] - expected) <= bound).all()

    steps = np.concatenate([-np.geomspace(1e-6, 80, 200), [0], np.geomspace(1e-6, 1e6, 200)]).astype(np.float32)
    n = len(steps)
    ones = np.ones((1, 1, 1, n_state), np.float32)
    _, state = kernels.selective_scan(
        np.ones((1, 1, n, 1), np.float32),
        steps.reshape(1, 1, n),
        np.zeros((n, n_state), np.float32),
        ones,
        ones,
        np.zeros((1, n, 1, n_state), np.float32),
    )
    expected = np.logaddexp(0, steps.astype(np.float64))[:, None]
    assert (np.abs(state[0, :, 0] - expected) <= 5e-7 * expected).all()


@every_isa
@every_batch
@every_size
@pytest.mark.parametrize(("width", "n_taps"), [(5, 3), (67, 4), (32, 1), (300, 3)])
def test_gated_convolutions(isa: str, n_seqs: int, n_tokens: int, size: float, width: int, n_taps: int) -> None:
    random = RandomArrays(2)
    arguments = [
        random(n_seqs, n_tokens, 3 * width, scale=size),
        random(n_seqs, n_taps - 1, width),
        random(n_taps, width),
    ]
    assert_equal_on_cpu_and_reference(isa, lambda kernels: run_without_changes(arguments, kernels.gated_convolution))


@every_isa
@every_batch
@every_size
@pytest.mark.parametrize(("n_inner", "n_state", "n_taps", "n_rank"), [(37, 16, 4, 3), (70, 5, 1, 9), (530, 12, 2, 16)])
def test_mamba(
    isa: str, n_seqs: int, n_tokens: int, size: float, n_inner: int, n_state: int, n_taps: int, n_rank: int
) -> None:
    def run(kernels: KernelSet) -> tuple[Floats, ...]:
        weights = mamba_layer(kernels, n_inner, n_state, n_taps, n_rank)
        random = RandomArrays(4)
        arguments = [
            random(n_seqs, n_tokens, 2 * n_inner, scale=size),
            random(n_seqs, n_taps - 1, n_inner),
            random(n_seqs, n_inner, 1, n_state),
        ]
        return run_without_changes(arguments, lambda *arrays: kernels.mamba(weights, *arrays))

    assert_equal_on_cpu_and_reference(isa, run)


def mamba_layer(kernels: KernelSet, n_inner: int, n_state: int, n_taps: int, n_rank: int) -> Mamba:
    random = RandomArrays(3)
    return Mamba(
        spec=MambaSpec(n_inner, n_state, n_taps, n_rank),
        project=random.linear(kernels, 2 * n_inner, 8),
        taps=random(n_taps, n_inner),
        conv_bias=random(n_inner),
        select=random.linear(kernels, n_rank + 2 * n_state, n_inner),
        norms=[random.norm(n_rank), None, random.norm(n_state)],
        steps=random.linear(kernels, n_inner, n_rank, bias=True),
        a=-np.exp(random(n_inner, n_state)),
        d=random(n_inner),
        output=random.linear(kernels, 8, n_inner),
    )


@every_isa
@every_batch
@every_size
@pytest.mark.parametrize(
    ("n_heads", "n_groups", "width", "n_state", "normed"),
    [(6, 3, 5, 16, True), (3, 1, 40, 7, False), (4, 2, 17, 33, True)],
)
def test_mamba2(
    isa: str,
    n_seqs: int,
    n_tokens: int,
    size: float,
    n_heads: int,
    n_groups: int,
    width: int,
    n_state: int,
    normed: bool,
) -> None:
    def run(kernels: KernelSet) -> tuple[Floats, ...]:
        weights = mamba2_layer(kernels, n_heads, n_groups, width, n_state)
        if not normed:
            weights = replace(weights, norm=None, conv_bias=None)
        random, spec = RandomArrays(6), weights.spec
        arguments = [
            random(n_seqs, n_tokens, spec.n_inner + spec.n_convolved + n_heads, scale=size),
            random(n_seqs, spec.n_taps - 1, spec.n_convolved),
            random(n_seqs, n_heads, width, n_state),
        ]
        return run_without_changes(arguments, lambda *arrays: kernels.mamba2(weights, *arrays))

    assert_equal_on_cpu_and_reference(isa, run)


def mamba2_layer(kernels: KernelSet, n_heads: int, n_groups: int, width: int, n_state: int) -> Mamba2:
    random, spec = RandomArrays(5), Mamba2Spec(n_heads * width, n_state, 4, n_heads, n_groups)
    return Mamba2(
        spec=spec,
        project=random.linear(kernels, spec.n_inner + spec.n_convolved + n_heads, 8),
        taps=random(4, spec.n_convolved),
        conv_bias=random(spec.n_convolved),
        step_bias=random(n_heads),
        a=-np.exp(random(n_heads, 1)),
        d=random(n_heads, 1),
        norm=random.norm(n_groups, spec.n_inner // n_groups),
        output=random.linear(kernels, 8, spec.n_inner),
    )


@every_isa
@every_batch
@pytest.mark.parametrize("scale", [1.0, -0.3])
@pytest.mark.parametrize("kind", ["convolution", "mamba", "mamba2", "mamba without kernels"])
def test_whole_layers_from_norm_to_residual(isa: str, n_seqs: int, n_tokens: int, scale: float, kind: str) -> None:
    """The norm, both products and the residual in one call."""

    def run(kernels: KernelSet) -> tuple[Floats, ...]:
        weights, random = recurrent_weights(kernels, kind), RandomArrays(13)
        width = weights.project.weight.n_in
        arguments = [random(n_seqs * n_tokens, width), random(n_seqs * n_tokens, width)]
        arguments += [random(n_seqs, *shape) for shape in state_shapes(weights)]

        def layer(norm: Norm, x: Floats, residual: Floats, *before: Floats) -> tuple[Floats, ...]:
            y, after = kernels.recurrent_layer(weights, x, norm, residual, scale, before)
            return (y, *after)

        norms = Norm(random(width), random(width), NormKind.LAYER, 1e-5), Norm(random(width), None, NormKind.RMS, 1e-5)
        return tuple(chain.from_iterable(run_without_changes(arguments, partial(layer, norm)) for norm in norms))

    assert_equal_on_cpu_and_reference(isa, run)


def recurrent_weights(kernels: KernelSet, kind: str) -> RecurrentWeights:
    random = RandomArrays(14)
    if kind == "mamba2":
        return replace(mamba2_layer(kernels, 6, 3, 5, 16), output=random.linear(kernels, 8, 30, bias=True))
    if kind == "convolution":
        return ShortConv(random.linear(kernels, 3 * 17, 17, bias=True), random(4, 17), random.linear(kernels, 17, 17))
    mamba = mamba_layer(kernels, 37, 5, 4, 3)
    return mamba if kind == "mamba" else replace(mamba, steps=replace(mamba.steps, scale=random(1)))


def state_shapes(weights: RecurrentWeights) -> list[tuple[int, ...]]:
    """The shapes of the convolution window and of the state of a sequence."""
    n_taps, n_convolved = weights.taps.shape
    if isinstance(weights, ShortConv):
        return [(n_taps - 1, n_convolved)]
    spec = weights.spec
    heads = (spec.n_inner, 1) if isinstance(spec, MambaSpec) else (spec.n_heads, spec.n_inner // spec.n_heads)
    return [(n_taps - 1, n_convolved), (*heads, spec.n_state)]


@every_isa
@every_batch
@every_size
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("n_heads", "head_dim"), [(3, 5), (2, 64), (1, 23)])
def test_time_mixing(
    isa: str, n_seqs: int, n_tokens: int, size: float, is_first: bool, n_heads: int, head_dim: int
) -> None:
    def run(kernels: KernelSet) -> tuple[Floats, ...]:
        weights, n_embd, random = (
            time_mix_layer(kernels, n_heads, head_dim, is_first),
            n_heads * head_dim,
            RandomArrays(8),
        )
        arguments = [
            random(n_seqs, n_tokens, n_embd, scale=size),
            random(n_seqs, 1, n_embd),
            random(n_seqs, n_heads, head_dim, head_dim),
        ]
        value = None if is_first else random(n_seqs * n_tokens, n_embd)
        return run_without_changes(arguments, lambda *arrays: kernels.time_mix(weights, *arrays, value))

    assert_equal_on_cpu_and_reference(isa, run)


def time_mix_layer(kernels: KernelSet, n_heads: int, head_dim: int, is_first: bool) -> Rwkv7:
    random, n_embd, heads = RandomArrays(7), n_heads * head_dim, (n_heads, head_dim)

    def low_rank(rank: int, *, has_base: bool = True) -> LowRank:
        down, up = random.linear(kernels, rank, n_embd), random.linear(kernels, n_embd, rank)
        return LowRank(down, up, random(n_embd) if has_base else None)

    to_unit = np.full(head_dim, head_dim**-0.5, np.float32)
    return Rwkv7(
        spec=Rwkv7Spec(n_embd, head_dim, is_first),
        shares=random(6, n_embd),
        receptance=random.linear(kernels, n_embd, n_embd),
        key=random.linear(kernels, n_embd, n_embd),
        value=random.linear(kernels, n_embd, n_embd),
        decay=low_rank(7),
        rate=low_rank(3),
        first_value=None if is_first else low_rank(2),
        gate=low_rank(17, has_base=False),
        key_removed=random(n_embd),
        key_rate=random(n_embd),
        bonus=random(*heads),
        unit_norm=Norm(to_unit, None, NormKind.RMS, 1e-24),
        head_norm=Norm(random(*heads), random(*heads), NormKind.LAYER, 64e-5),
        output=random.linear(kernels, n_embd, n_embd),
    )


@every_isa
@every_batch
@every_size
@pytest.mark.parametrize(("n_embd", "n_ff"), [(5, 7), (64, 50), (333, 200)])
def test_channel_mixing(isa: str, n_seqs: int, n_tokens: int, size: float, n_embd: int, n_ff: int) -> None:
    def run(kernels: KernelSet) -> tuple[Floats, ...]:
        random = RandomArrays(9)
        weights = ChannelMix(random(n_embd), random.linear(kernels, n_ff, n_embd), random.linear(kernels, n_embd, n_ff))
        arguments = [random(n_seqs, n_tokens, n_embd, scale=size), random(n_seqs, 1, n_embd)]
        return run_without_changes(arguments, lambda *arrays: (kernels.channel_mix(weights, *arrays),))

    assert_equal_on_cpu_and_reference(isa, run)


@every_isa
@every_batch
@every_size
@pytest.mark.parametrize("from_first", [True, False])
def test_rwkv_layers_in_one_call(isa: str, n_seqs: int, n_tokens: int, size: float, from_first: bool) -> None:
    """Three RWKV layers in one call equal their norms, time mixings, channel mixings and residuals."""
    n_heads, head_dim, n_embd = 2, 7, 14

    def run(kernels: KernelSet) -> tuple[Floats, ...]:
        random = RandomArrays(12)
        blocks = [rwkv_block(kernels, n_heads, head_dim, from_first and i == 0) for i in range(3)]
        x, value = random(n_seqs, n_tokens, n_embd, scale=size), random(n_seqs * n_tokens, n_embd)
        shapes = (n_seqs, 1, n_embd), (n_seqs, n_heads, head_dim, head_dim), (n_seqs, 1, n_embd)
        before: list[RwkvState] = [(random(*shapes[0]), random(*shapes[1]), random(*shapes[2])) for _ in blocks]
        run_blocks: Callable[..., tuple[Floats, Floats, Sequence[RwkvState]]] = partial(
            run_blocks_unfused, kernels, blocks
        )
        if isinstance(kernels, CpuKernels):
            run_blocks = fuse_blocks(kernels, blocks)
        arguments = [x, value, *chain.from_iterable(before)]
        copies = [array.copy() for array in arguments]
        y, values, after = run_blocks(x, before, None if from_first else value)
        for array, copy in zip(arguments, copies, strict=True):
            np.testing.assert_array_equal(array, copy, "a step changed its argument")
        return (y, values, *chain.from_iterable(after))

    assert_equal_on_cpu_and_reference(isa, run)


def fuse_blocks(kernels: CpuKernels, blocks: Sequence[RwkvBlock]) -> Callable[..., Any]:
    """The fused call of consecutive layers; it takes x, the states, and the values of the first layer."""
    (call,) = kernels.fuse([RwkvStep(kernels, i, False, block) for i, block in enumerate(blocks)])
    assert isinstance(call, CpuRwkvLayers) and len(call.blocks) == len(blocks)
    return lambda x, before, first_value: call.kernels.rwkv_blocks(x, list(call.blocks), before, first_value)


def run_blocks_unfused(
    kernels: KernelSet, blocks: Sequence[RwkvBlock], x: Floats, before: Sequence[RwkvState], value: Floats | None
) -> tuple[Floats, Floats, list[RwkvState]]:
    """The results of the fused call, computed by unfused steps."""
    after = []
    for block, (last, state, channel_last) in zip(blocks, before, strict=True):
        time_input = kernels.normed(x, block.time_norm)
        attention, layer_value, state = kernels.time_mix(block.time, time_input, last, state, value)
        value = layer_value if value is None else value
        x = x + kernels.linear(attention.reshape(-1, x.shape[-1]), block.time.output).reshape(x.shape)
        channel_input = kernels.normed(x, block.channel_norm)
        x = x + kernels.channel_mix(block.channel, channel_input, channel_last)
        after.append((time_input[:, -1:], state, channel_input[:, -1:]))
    assert value is not None
    return x, value, after


def rwkv_block(kernels: KernelSet, n_heads: int, head_dim: int, is_first: bool) -> RwkvBlock:
    random, n_embd, n_ff = RandomArrays(11 + is_first), n_heads * head_dim, 33
    norms = [Norm(random(n_embd), random(n_embd), NormKind.LAYER, 1e-5) for _ in range(2)]
    channel = ChannelMix(random(n_embd), random.linear(kernels, n_ff, n_embd), random.linear(kernels, n_embd, n_ff))
    return RwkvBlock(norms[0], time_mix_layer(kernels, n_heads, head_dim, is_first), norms[1], channel)


@every_isa
def test_layers_with_scales_or_biases_are_composed_of_steps(isa: str) -> None:
    """The fused calls support no scale or bias of these products."""

    def run(kernels: KernelSet) -> tuple[Floats, ...]:
        random = RandomArrays(10)
        scaled = mamba_layer(kernels, 37, 5, 4, 3)
        scaled = replace(scaled, steps=replace(scaled.steps, scale=random(1)))
        biased = time_mix_layer(kernels, 2, 6, False)
        biased = replace(biased, key=replace(biased.key, bias=random(12)))
        mix = ChannelMix(random(12), random.linear(kernels, 9, 12, bias=True), random.linear(kernels, 12, 9))
        x, last = random(2, 5, 12), random(2, 1, 12)
        return (
            *kernels.mamba(scaled, random(2, 5, 74), random(2, 3, 37), random(2, 37, 1, 5)),
            *kernels.time_mix(biased, x, last, random(2, 2, 6, 6), random(10, 12)),
            kernels.channel_mix(mix, x, last),
        )

    assert_equal_on_cpu_and_reference(isa, run)


def zeros(*shape: int) -> Floats:
    return np.zeros(shape, np.float32)


def test_mismatched_convolutions_are_refused() -> None:
    native = _extension.load().StateKernels("scalar", 1)
    valid: dict[str, Any] = {"projected": zeros(2, 3, 15), "window": zeros(2, 2, 5), "taps": zeros(3, 5)}
    native.gated_convolution(**valid)
    for name, shape in [
        ("projected", (2, 3, 16)), ("projected", (2, 0, 15)), ("projected", (6, 15)), ("window", (2, 3, 5)),
        ("window", (1, 2, 5)), ("taps", (0, 5)), ("taps", (3, 4)), ("taps", (15,)),
    ]:  # fmt: skip
        with pytest.raises(ValueError):
            native.gated_convolution(**(valid | {name: zeros(*shape)}))
    with pytest.raises(TypeError, match="float32"):
        native.gated_convolution(**(valid | {"taps": np.zeros((3, 5))}))


def test_mismatched_mamba_layers_are_refused() -> None:
    kernels = CpuKernels("scalar", 1, 0)
    one, two = mamba_layer(kernels, 6, 5, 4, 3), mamba2_layer(kernels, 6, 3, 2, 5)
    valid = zeros(2, 3, 12), zeros(2, 3, 6), zeros(2, 6, 1, 5)
    kernels.mamba(one, *valid)
    for i, shape in [
        (0, (2, 3, 13)),
        (0, (2, 0, 12)),
        (1, (2, 2, 6)),
        (1, (1, 3, 6)),
        (2, (2, 6, 1, 4)),
        (2, (2, 6, 5)),
    ]:
        with pytest.raises(ValueError):
            kernels.mamba(one, *valid[:i], zeros(*shape), *valid[i + 1 :])
    for change in (
        {"taps": zeros(4, 5)},
        {"conv_bias": zeros(5)},
        {"a": zeros(5, 5)},
        {"d": zeros(5)},
        {"select": one.steps},
    ):
        with pytest.raises(ValueError):
            kernels.mamba(replace(one, **change), *valid)
    valid = zeros(2, 3, 60), zeros(2, 3, 42), zeros(2, 6, 2, 5)
    kernels.mamba2(two, *valid)
    for i, shape in [(0, (2, 3, 61)), (1, (2, 3, 41)), (2, (1, 6, 2, 5)), (2, (2, 7, 2, 5)), (2, (2, 6, 10))]:
        with pytest.raises(ValueError):
            kernels.mamba2(two, *valid[:i], zeros(*shape), *valid[i + 1 :])
    for change in (
        {"a": zeros(6, 5)},
        {"d": zeros(6)},
        {"step_bias": zeros(5)},
        {"norm": Norm(zeros(2, 6), None, NormKind.RMS, 0)},
    ):
        with pytest.raises(ValueError):
            kernels.mamba2(replace(two, **change), *valid)


@pytest.mark.parametrize("kind", ["convolution", "mamba", "mamba2"])
def test_mismatched_recurrent_layers_are_refused(kind: str) -> None:
    kernels = CpuKernels("scalar", 1, 0)
    weights = recurrent_weights(kernels, kind)
    width, shapes = weights.project.weight.n_in, state_shapes(weights)
    norm, valid = Norm(zeros(width), None, NormKind.RMS, 1e-5), [zeros(2, *shape) for shape in shapes]
    kernels.recurrent_layer(weights, zeros(6, width), norm, zeros(6, width), 1, valid)
    for rows, added, before in [
        ((6, width + 1), (6, width), valid),
        ((6, width), (5, width), valid),
        ((5, width), (5, width), valid),
        ((0, width), (0, width), valid),
        ((6 * width,), (6, width), valid),
        ((6, width), (6, width), valid[:1] if len(valid) == 2 else valid * 2),
        ((6, width), (6, width), [zeros(2, shapes[0][0] + 1, shapes[0][1]), *valid[1:]]),
        ((6, width), (6, width), [zeros(0, *shapes[0]), *valid[1:]]),
    ]:
        with pytest.raises(ValueError):
            kernels.recurrent_layer(weights, zeros(*rows), norm, zeros(*added), 1, before)
    for change in ({"project": weights.output}, {"output": weights.project}):
        with pytest.raises(ValueError):
            mismatched = replace(weights, **change)
            kernels.recurrent_layer(mismatched, zeros(6, width), norm, zeros(6, width), 1, valid)
    with pytest.raises(ValueError, match="norm"):
        narrow = Norm(zeros(width - 1), None, NormKind.RMS, 1e-5)
        kernels.recurrent_layer(weights, zeros(6, width), narrow, zeros(6, width), 1, valid)
    other_isa = CpuKernels(CpuKernels(None, 1, 0).isa, 1, 0)
    if other_isa.isa != "scalar":
        with pytest.raises(ValueError, match="another instruction set"):
            other_isa.recurrent_layer(weights, zeros(6, width), norm, zeros(6, width), 1, valid)


def test_mismatched_rwkv_layers_are_refused() -> None:
    kernels = CpuKernels("scalar", 1, 0)
    layer = time_mix_layer(kernels, 2, 6, False)
    valid = zeros(2, 3, 12), zeros(2, 1, 12), zeros(2, 2, 6, 6), zeros(6, 12)
    kernels.time_mix(layer, *valid)
    for i, shape in [(0, (2, 3, 13)), (1, (1, 1, 12)), (2, (2, 2, 6, 5)), (2, (2, 3, 6, 6)), (3, (5, 12))]:
        with pytest.raises(ValueError):
            kernels.time_mix(layer, *valid[:i], zeros(*shape), *valid[i + 1 :])
    for change in (
        {"shares": zeros(5, 12)},
        {"bonus": zeros(11)},
        {"gate": LowRank(layer.rate.down, layer.gate.up, None)},
    ):
        with pytest.raises(ValueError):
            kernels.time_mix(replace(layer, **change), *valid)
    with pytest.raises(ValueError, match="missing"):
        kernels.time_mix(layer, *valid[:3], None)
    mix = ChannelMix(zeros(12), layer.key, layer.key)
    kernels.channel_mix(mix, zeros(2, 3, 12), zeros(2, 1, 12))
    for x, last, share in [((2, 3, 11), (2, 1, 11), 12), ((2, 3, 12), (1, 1, 12), 12), ((2, 3, 12), (2, 1, 12), 11)]:
        with pytest.raises(ValueError):
            kernels.channel_mix(replace(mix, share=zeros(share)), zeros(*x), zeros(*last))
    blocks = [rwkv_block(kernels, 2, 6, True), rwkv_block(kernels, 2, 6, False)]
    fused, later = fuse_blocks(kernels, blocks), fuse_blocks(kernels, blocks[1:])
    state = zeros(2, 1, 12), zeros(2, 2, 6, 6), zeros(2, 1, 12)
    fused(zeros(2, 3, 12), [state, state], None)
    later(zeros(2, 3, 12), [state], zeros(6, 12))
    for run, x, states, values in [
        (fused, (2, 3, 11), [state, state], None),
        (fused, (2, 3, 12), [state], None),
        (fused, (2, 3, 12), [state, (state[0], zeros(2, 2, 6, 5), state[2])], None),
        (fused, (2, 3, 12), [state, (*state[:2], zeros(1, 1, 12))], None),
        (fused, (2, 3, 12), [state, state], zeros(6, 12)),
        (later, (2, 3, 12), [state], None),
        (later, (2, 3, 12), [state], zeros(5, 12)),
    ]:
        with pytest.raises(ValueError):
            run(zeros(*x), states, values)
    with pytest.raises(ValueError, match="first block after another block"):
        fuse_blocks(kernels, blocks[::-1])(zeros(2, 3, 12), [state, state], zeros(6, 12))
    with pytest.raises(ValueError, match="width"):
        fuse_blocks(kernels, [replace(blocks[0], channel=mix, channel_norm=Norm(zeros(11), None, NormKind.RMS, 0))])
    other_isa = CpuKernels(CpuKernels(None, 1, 0).isa, 1, 0)
    if other_isa.isa != "scalar":
        with pytest.raises(ValueError, match="another instruction set"):
            other_isa.channel_mix(mix, zeros(2, 3, 12), zeros(2, 1, 12))
