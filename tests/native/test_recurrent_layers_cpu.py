"""Layers with a state in C++, every instruction set of this machine, against their composition of NumPy steps.

Sizes leave rests of vectors, of blocks of four rows and of shares of threads. Weights are F32, which products do not
round: what is left is float32 rounding. Sums of at most 200 products differ by some 1e-6 of the largest number that
they are made of, and what follows them (decays, norms, gates) does not make more of it than a few times that; states
pass it on from token to token, in which it does not grow, as they decay.
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
every_isa = pytest.mark.parametrize("isa", _extension.load().available_isas())
every_batch = pytest.mark.parametrize(("n_seqs", "n_tokens"), [(1, 1), (1, 9), (3, 2), (2, 41)])
every_size = pytest.mark.parametrize("size", [0.0, 1.0, 30.0])
N_THREADS = 3


class Numbers:
    """Random numbers, each call others."""

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


def both(isa: str, run: Callable[[KernelSet], tuple[Floats, ...]]) -> None:
    """What a layer gives in C++ is what its composition gives in NumPy."""
    found, wanted = run(CpuKernels(isa, N_THREADS, 0)), run(ReferenceKernels())
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.dtype == np.float32
        assert one.shape == other.shape
        worst = np.abs(one.astype(np.float64) - other).max(initial=0)
        limit = CLOSE * max(1.0, np.abs(other).max(initial=0))
        assert worst <= limit, f"result {i}: off by {worst:.2e}, at most {limit:.2e}"


def unchanged(arrays: list[Floats], run: Callable[..., tuple[Floats, ...]]) -> tuple[Floats, ...]:
    """What ``run`` gives for the arrays, which it leaves as they are."""
    before = [array.copy() for array in arrays]
    found = run(*arrays)
    for array, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, copy, "a step changed its argument")
    return found


@every_isa
@every_batch
@pytest.mark.parametrize(
    ("n_groups", "n_heads", "width", "n_state", "n_rates"),
    [(1, 37, 1, 16, 16), (1, 70, 1, 21, 21), (3, 6, 5, 12, 1), (1, 3, 21, 32, 1), (2, 2, 3, 7, 7), (5, 5, 1, 1, 1)],
)
def test_scans(
    isa: str, n_seqs: int, n_tokens: int, n_groups: int, n_heads: int, width: int, n_state: int, n_rates: int
) -> None:
    some = Numbers(1)
    given = [
        some(n_seqs, n_tokens, n_heads, width),
        some(n_seqs, n_tokens, n_heads, scale=5),
        -np.exp(some(n_heads, n_rates)),
        some(n_seqs, n_tokens, n_groups, n_state),
        some(n_seqs, n_tokens, n_groups, n_state),
        some(n_seqs, n_heads, width, n_state),
    ]
    both(isa, lambda kernels: unchanged(given, kernels.selective_scan))


@every_isa
@pytest.mark.parametrize("n_state", [1, 16, 19])
def test_decays_and_steps_of_any_size(isa: str, n_state: int) -> None:
    """Rates decay a state of ones, and steps drive one of zeros: within a few units in the last place.

    An exponent e is rounded to |e| 2⁻²⁴, and so is the number that its power becomes: hence 1e-7 for each of the
    exponent. What is less than exp(-87), 1.7e-38, may be lost.
    """
    kernels = CpuKernels(isa, 1, 0)
    exponents = -np.concatenate([np.geomspace(1e-6, 120, 300), [0, 86, 87, 87.3, 88, 500]]).astype(np.float32)
    n = len(exponents)
    step = np.full((1, 1, n), np.log(np.expm1(1.0)), np.float32)  # softplus gives 1
    rates = np.repeat(exponents[:, None], n_state, 1)
    nothing = np.zeros((1, 1, 1, n_state), np.float32)
    x = np.zeros((1, 1, n, 1), np.float32)
    _, state = kernels.selective_scan(x, step, rates, nothing, nothing, np.ones((1, n, 1, n_state), np.float32))
    wanted = np.exp(rates.astype(np.float64))
    allowed = (4e-7 + 3e-7 * np.abs(rates)) * wanted + 1.7e-38
    assert (np.abs(state[0, :, 0] - wanted) <= allowed).all()

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
    wanted = np.logaddexp(0, steps.astype(np.float64))[:, None]
    assert (np.abs(state[0, :, 0] - wanted) <= 5e-7 * wanted).all()


@every_isa
@every_batch
@every_size
@pytest.mark.parametrize(("width", "n_taps"), [(5, 3), (67, 4), (32, 1), (300, 3)])
def test_gated_convolutions(isa: str, n_seqs: int, n_tokens: int, size: float, width: int, n_taps: int) -> None:
    some = Numbers(2)
    given = [some(n_seqs, n_tokens, 3 * width, scale=size), some(n_seqs, n_taps - 1, width), some(n_taps, width)]
    both(isa, lambda kernels: unchanged(given, kernels.gated_convolution))


@every_isa
@every_batch
@every_size
@pytest.mark.parametrize(("n_inner", "n_state", "n_taps", "n_rank"), [(37, 16, 4, 3), (70, 5, 1, 9), (530, 12, 2, 16)])
def test_mamba(
    isa: str, n_seqs: int, n_tokens: int, size: float, n_inner: int, n_state: int, n_taps: int, n_rank: int
) -> None:
    def run(kernels: KernelSet) -> tuple[Floats, ...]:
        weights = mamba_layer(kernels, n_inner, n_state, n_taps, n_rank)
        some = Numbers(4)
        given = [
            some(n_seqs, n_tokens, 2 * n_inner, scale=size),
            some(n_seqs, n_taps - 1, n_inner),
            some(n_seqs, n_inner, 1, n_state),
        ]
        return unchanged(given, lambda *arrays: kernels.mamba(weights, *arrays))

    both(isa, run)


def mamba_layer(kernels: KernelSet, n_inner: int, n_state: int, n_taps: int, n_rank: int) -> Mamba:
    some = Numbers(3)
    return Mamba(
        spec=MambaSpec(n_inner, n_state, n_taps, n_rank),
        project=some.linear(kernels, 2 * n_inner, 8),
        taps=some(n_taps, n_inner),
        conv_bias=some(n_inner),
        select=some.linear(kernels, n_rank + 2 * n_state, n_inner),
        norms=[some.norm(n_rank), None, some.norm(n_state)],
        steps=some.linear(kernels, n_inner, n_rank, bias=True),
        a=-np.exp(some(n_inner, n_state)),
        d=some(n_inner),
        output=some.linear(kernels, 8, n_inner),
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
        some, spec = Numbers(6), weights.spec
        given = [
            some(n_seqs, n_tokens, spec.n_inner + spec.n_convolved + n_heads, scale=size),
            some(n_seqs, spec.n_taps - 1, spec.n_convolved),
            some(n_seqs, n_heads, width, n_state),
        ]
        return unchanged(given, lambda *arrays: kernels.mamba2(weights, *arrays))

    both(isa, run)


def mamba2_layer(kernels: KernelSet, n_heads: int, n_groups: int, width: int, n_state: int) -> Mamba2:
    some, spec = Numbers(5), Mamba2Spec(n_heads * width, n_state, 4, n_heads, n_groups)
    return Mamba2(
        spec=spec,
        project=some.linear(kernels, spec.n_inner + spec.n_convolved + n_heads, 8),
        taps=some(4, spec.n_convolved),
        conv_bias=some(spec.n_convolved),
        step_bias=some(n_heads),
        a=-np.exp(some(n_heads, 1)),
        d=some(n_heads, 1),
        norm=some.norm(n_groups, spec.n_inner // n_groups),
        output=some.linear(kernels, 8, spec.n_inner),
    )


@every_isa
@every_batch
@pytest.mark.parametrize("scale", [1.0, -0.3])
@pytest.mark.parametrize("kind", ["convolution", "mamba", "mamba2", "mamba without kernels"])
def test_layers_from_their_norms_to_their_output(isa: str, n_seqs: int, n_tokens: int, scale: float, kind: str) -> None:
    """The norm, both products and what is added in the same call."""

    def run(kernels: KernelSet) -> tuple[Floats, ...]:
        weights, some = state_weights(kernels, kind), Numbers(13)
        width = weights.project.weight.n_in
        given = [some(n_seqs * n_tokens, width), some(n_seqs * n_tokens, width)]
        given += [some(n_seqs, *shape) for shape in shapes_of(weights)]

        def layer(norm: Norm, x: Floats, residual: Floats, *before: Floats) -> tuple[Floats, ...]:
            y, after = kernels.recurrent_layer(weights, x, norm, residual, scale, before)
            return (y, *after)

        norms = Norm(some(width), some(width), NormKind.LAYER, 1e-5), Norm(some(width), None, NormKind.RMS, 1e-5)
        return tuple(chain.from_iterable(unchanged(given, partial(layer, norm)) for norm in norms))

    both(isa, run)


def state_weights(kernels: KernelSet, kind: str) -> RecurrentWeights:
    some = Numbers(14)
    if kind == "mamba2":
        return replace(mamba2_layer(kernels, 6, 3, 5, 16), output=some.linear(kernels, 8, 30, bias=True))
    if kind == "convolution":
        return ShortConv(some.linear(kernels, 3 * 17, 17, bias=True), some(4, 17), some.linear(kernels, 17, 17))
    mamba = mamba_layer(kernels, 37, 5, 4, 3)
    return mamba if kind == "mamba" else replace(mamba, steps=replace(mamba.steps, scale=some(1)))


def shapes_of(weights: RecurrentWeights) -> list[tuple[int, ...]]:
    """Of the window and the state of a sequence."""
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
        weights, n_embd, some = time_mix_layer(kernels, n_heads, head_dim, is_first), n_heads * head_dim, Numbers(8)
        given = [
            some(n_seqs, n_tokens, n_embd, scale=size),
            some(n_seqs, 1, n_embd),
            some(n_seqs, n_heads, head_dim, head_dim),
        ]
        value = None if is_first else some(n_seqs * n_tokens, n_embd)
        return unchanged(given, lambda *arrays: kernels.time_mix(weights, *arrays, value))

    both(isa, run)


def time_mix_layer(kernels: KernelSet, n_heads: int, head_dim: int, is_first: bool) -> Rwkv7:
    some, n_embd, heads = Numbers(7), n_heads * head_dim, (n_heads, head_dim)

    def low_rank(rank: int, *, based: bool = True) -> LowRank:
        down, up = some.linear(kernels, rank, n_embd), some.linear(kernels, n_embd, rank)
        return LowRank(down, up, some(n_embd) if based else None)

    to_unit = np.full(head_dim, head_dim**-0.5, np.float32)
    return Rwkv7(
        spec=Rwkv7Spec(n_embd, head_dim, is_first),
        shares=some(6, n_embd),
        receptance=some.linear(kernels, n_embd, n_embd),
        key=some.linear(kernels, n_embd, n_embd),
        value=some.linear(kernels, n_embd, n_embd),
        decay=low_rank(7),
        rate=low_rank(3),
        first_value=None if is_first else low_rank(2),
        gate=low_rank(17, based=False),
        key_removed=some(n_embd),
        key_rate=some(n_embd),
        bonus=some(*heads),
        unit_norm=Norm(to_unit, None, NormKind.RMS, 1e-24),
        head_norm=Norm(some(*heads), some(*heads), NormKind.LAYER, 64e-5),
        output=some.linear(kernels, n_embd, n_embd),
    )


@every_isa
@every_batch
@every_size
@pytest.mark.parametrize(("n_embd", "n_ff"), [(5, 7), (64, 50), (333, 200)])
def test_channel_mixing(isa: str, n_seqs: int, n_tokens: int, size: float, n_embd: int, n_ff: int) -> None:
    def run(kernels: KernelSet) -> tuple[Floats, ...]:
        some = Numbers(9)
        weights = ChannelMix(some(n_embd), some.linear(kernels, n_ff, n_embd), some.linear(kernels, n_embd, n_ff))
        given = [some(n_seqs, n_tokens, n_embd, scale=size), some(n_seqs, 1, n_embd)]
        return unchanged(given, lambda *arrays: (kernels.channel_mix(weights, *arrays),))

    both(isa, run)


@every_isa
@every_batch
@every_size
@pytest.mark.parametrize("from_first", [True, False])
def test_blocks_of_rwkv(isa: str, n_seqs: int, n_tokens: int, size: float, from_first: bool) -> None:
    """Three blocks in one call are both mixings of each, behind their norms, added to what entered."""
    n_heads, head_dim, n_embd = 2, 7, 14

    def run(kernels: KernelSet) -> tuple[Floats, ...]:
        some = Numbers(12)
        blocks = [rwkv_block(kernels, n_heads, head_dim, from_first and i == 0) for i in range(3)]
        x, value = some(n_seqs, n_tokens, n_embd, scale=size), some(n_seqs * n_tokens, n_embd)
        shapes = (n_seqs, 1, n_embd), (n_seqs, n_heads, head_dim, head_dim), (n_seqs, 1, n_embd)
        before: list[RwkvState] = [(some(*shapes[0]), some(*shapes[1]), some(*shapes[2])) for _ in blocks]
        through: Callable[..., tuple[Floats, Floats, Sequence[RwkvState]]] = partial(block_by_block, kernels, blocks)
        if isinstance(kernels, CpuKernels):
            through = in_one_call(kernels, blocks)
        given = [x, value, *chain.from_iterable(before)]
        kept = [array.copy() for array in given]
        y, values, after = through(x, before, None if from_first else value)
        for array, copy in zip(given, kept, strict=True):
            np.testing.assert_array_equal(array, copy, "a step changed its argument")
        return (y, values, *chain.from_iterable(after))

    both(isa, run)


def in_one_call(kernels: CpuKernels, blocks: Sequence[RwkvBlock]) -> Callable[..., Any]:
    """The call that the tier makes of neighbouring layers: of x, the states before it, and the first layer's values."""
    (call,) = kernels.fuse([RwkvStep(kernels, i, False, block) for i, block in enumerate(blocks)])
    assert isinstance(call, CpuRwkvLayers) and len(call.blocks) == len(blocks)
    return lambda x, before, first_value: call.kernels.rwkv_blocks(x, list(call.blocks), before, first_value)


def block_by_block(
    kernels: KernelSet, blocks: Sequence[RwkvBlock], x: Floats, before: Sequence[RwkvState], value: Floats | None
) -> tuple[Floats, Floats, list[RwkvState]]:
    """What ``in_one_call`` gives, by the steps of other tiers."""
    after = []
    for block, (last, state, channel_last) in zip(blocks, before, strict=True):
        given = kernels.normed(x, block.time_norm)
        mixed, own, state = kernels.time_mix(block.time, given, last, state, value)
        value = own if value is None else value
        x = x + kernels.linear(mixed.reshape(-1, x.shape[-1]), block.time.output).reshape(x.shape)
        seen = kernels.normed(x, block.channel_norm)
        x = x + kernels.channel_mix(block.channel, seen, channel_last)
        after.append((given[:, -1:], state, seen[:, -1:]))
    assert value is not None
    return x, value, after


def rwkv_block(kernels: KernelSet, n_heads: int, head_dim: int, is_first: bool) -> RwkvBlock:
    some, n_embd, n_ff = Numbers(11 + is_first), n_heads * head_dim, 33
    norms = [Norm(some(n_embd), some(n_embd), NormKind.LAYER, 1e-5) for _ in range(2)]
    channel = ChannelMix(some(n_embd), some.linear(kernels, n_ff, n_embd), some.linear(kernels, n_embd, n_ff))
    return RwkvBlock(norms[0], time_mix_layer(kernels, n_heads, head_dim, is_first), norms[1], channel)


@every_isa
def test_layers_that_are_more_than_their_matrices_are_composed(isa: str) -> None:
    """Products with a scale or a bias have no place in the calls."""

    def run(kernels: KernelSet) -> tuple[Floats, ...]:
        some = Numbers(10)
        scaled = mamba_layer(kernels, 37, 5, 4, 3)
        scaled = replace(scaled, steps=replace(scaled.steps, scale=some(1)))
        biased = time_mix_layer(kernels, 2, 6, False)
        biased = replace(biased, key=replace(biased.key, bias=some(12)))
        mix = ChannelMix(some(12), some.linear(kernels, 9, 12, bias=True), some.linear(kernels, 12, 9))
        x, last = some(2, 5, 12), some(2, 1, 12)
        return (
            *kernels.mamba(scaled, some(2, 5, 74), some(2, 3, 37), some(2, 37, 1, 5)),
            *kernels.time_mix(biased, x, last, some(2, 2, 6, 6), some(10, 12)),
            kernels.channel_mix(mix, x, last),
        )

    both(isa, run)


def zeros(*shape: int) -> Floats:
    return np.zeros(shape, np.float32)


def test_convolutions_that_do_not_fit_are_refused() -> None:
    native = _extension.load().StateKernels("scalar", 1)
    right: dict[str, Any] = {"projected": zeros(2, 3, 15), "window": zeros(2, 2, 5), "taps": zeros(3, 5)}
    native.gated_convolution(**right)
    for name, shape in [
        ("projected", (2, 3, 16)), ("projected", (2, 0, 15)), ("projected", (6, 15)), ("window", (2, 3, 5)),
        ("window", (1, 2, 5)), ("taps", (0, 5)), ("taps", (3, 4)), ("taps", (15,)),
    ]:  # fmt: skip
        with pytest.raises(ValueError):
            native.gated_convolution(**(right | {name: zeros(*shape)}))
    with pytest.raises(TypeError, match="float32"):
        native.gated_convolution(**(right | {"taps": np.zeros((3, 5))}))


def test_state_spaces_that_do_not_fit_are_refused() -> None:
    kernels = CpuKernels("scalar", 1, 0)
    one, two = mamba_layer(kernels, 6, 5, 4, 3), mamba2_layer(kernels, 6, 3, 2, 5)
    right = zeros(2, 3, 12), zeros(2, 3, 6), zeros(2, 6, 1, 5)
    kernels.mamba(one, *right)
    for i, shape in [
        (0, (2, 3, 13)),
        (0, (2, 0, 12)),
        (1, (2, 2, 6)),
        (1, (1, 3, 6)),
        (2, (2, 6, 1, 4)),
        (2, (2, 6, 5)),
    ]:
        with pytest.raises(ValueError):
            kernels.mamba(one, *right[:i], zeros(*shape), *right[i + 1 :])
    for change in (
        {"taps": zeros(4, 5)},
        {"conv_bias": zeros(5)},
        {"a": zeros(5, 5)},
        {"d": zeros(5)},
        {"select": one.steps},
    ):
        with pytest.raises(ValueError):
            kernels.mamba(replace(one, **change), *right)
    right = zeros(2, 3, 60), zeros(2, 3, 42), zeros(2, 6, 2, 5)
    kernels.mamba2(two, *right)
    for i, shape in [(0, (2, 3, 61)), (1, (2, 3, 41)), (2, (1, 6, 2, 5)), (2, (2, 7, 2, 5)), (2, (2, 6, 10))]:
        with pytest.raises(ValueError):
            kernels.mamba2(two, *right[:i], zeros(*shape), *right[i + 1 :])
    for change in (
        {"a": zeros(6, 5)},
        {"d": zeros(6)},
        {"step_bias": zeros(5)},
        {"norm": Norm(zeros(2, 6), None, NormKind.RMS, 0)},
    ):
        with pytest.raises(ValueError):
            kernels.mamba2(replace(two, **change), *right)


@pytest.mark.parametrize("kind", ["convolution", "mamba", "mamba2"])
def test_layers_that_do_not_fit_are_refused(kind: str) -> None:
    kernels = CpuKernels("scalar", 1, 0)
    weights = state_weights(kernels, kind)
    width, shapes = weights.project.weight.n_in, shapes_of(weights)
    norm, right = Norm(zeros(width), None, NormKind.RMS, 1e-5), [zeros(2, *shape) for shape in shapes]
    kernels.recurrent_layer(weights, zeros(6, width), norm, zeros(6, width), 1, right)
    for rows, added, before in [
        ((6, width + 1), (6, width), right),
        ((6, width), (5, width), right),
        ((5, width), (5, width), right),
        ((0, width), (0, width), right),
        ((6 * width,), (6, width), right),
        ((6, width), (6, width), right[:1] if len(right) == 2 else right * 2),
        ((6, width), (6, width), [zeros(2, shapes[0][0] + 1, shapes[0][1]), *right[1:]]),
        ((6, width), (6, width), [zeros(0, *shapes[0]), *right[1:]]),
    ]:
        with pytest.raises(ValueError):
            kernels.recurrent_layer(weights, zeros(*rows), norm, zeros(*added), 1, before)
    for change in ({"project": weights.output}, {"output": weights.project}):
        with pytest.raises(ValueError):
            right_but_for_one = replace(weights, **change)
            kernels.recurrent_layer(right_but_for_one, zeros(6, width), norm, zeros(6, width), 1, right)
    with pytest.raises(ValueError, match="norm"):
        narrow = Norm(zeros(width - 1), None, NormKind.RMS, 1e-5)
        kernels.recurrent_layer(weights, zeros(6, width), narrow, zeros(6, width), 1, right)
    others = CpuKernels(CpuKernels(None, 1, 0).isa, 1, 0)
    if others.isa != "scalar":
        with pytest.raises(ValueError, match="another instruction set"):
            others.recurrent_layer(weights, zeros(6, width), norm, zeros(6, width), 1, right)


def test_mixtures_that_do_not_fit_are_refused() -> None:
    kernels = CpuKernels("scalar", 1, 0)
    layer = time_mix_layer(kernels, 2, 6, False)
    right = zeros(2, 3, 12), zeros(2, 1, 12), zeros(2, 2, 6, 6), zeros(6, 12)
    kernels.time_mix(layer, *right)
    for i, shape in [(0, (2, 3, 13)), (1, (1, 1, 12)), (2, (2, 2, 6, 5)), (2, (2, 3, 6, 6)), (3, (5, 12))]:
        with pytest.raises(ValueError):
            kernels.time_mix(layer, *right[:i], zeros(*shape), *right[i + 1 :])
    for change in (
        {"shares": zeros(5, 12)},
        {"bonus": zeros(11)},
        {"gate": LowRank(layer.rate.down, layer.gate.up, None)},
    ):
        with pytest.raises(ValueError):
            kernels.time_mix(replace(layer, **change), *right)
    with pytest.raises(ValueError, match="missing"):
        kernels.time_mix(layer, *right[:3], None)
    mix = ChannelMix(zeros(12), layer.key, layer.key)
    kernels.channel_mix(mix, zeros(2, 3, 12), zeros(2, 1, 12))
    for x, last, share in [((2, 3, 11), (2, 1, 11), 12), ((2, 3, 12), (1, 1, 12), 12), ((2, 3, 12), (2, 1, 12), 11)]:
        with pytest.raises(ValueError):
            kernels.channel_mix(replace(mix, share=zeros(share)), zeros(*x), zeros(*last))
    blocks = [rwkv_block(kernels, 2, 6, True), rwkv_block(kernels, 2, 6, False)]
    fused, later = in_one_call(kernels, blocks), in_one_call(kernels, blocks[1:])
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
    with pytest.raises(ValueError, match="first block behind another"):
        in_one_call(kernels, blocks[::-1])(zeros(2, 3, 12), [state, state], zeros(6, 12))
    with pytest.raises(ValueError, match="width"):
        in_one_call(kernels, [replace(blocks[0], channel=mix, channel_norm=Norm(zeros(11), None, NormKind.RMS, 0))])
    others = CpuKernels(CpuKernels(None, 1, 0).isa, 1, 0)
    if others.isa != "scalar":
        with pytest.raises(ValueError, match="another instruction set"):
            others.channel_mix(mix, zeros(2, 3, 12), zeros(2, 1, 12))
