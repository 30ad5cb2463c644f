"""Layers with convolutions and state spaces: their weights, and each as a composition of smaller steps.

Shapes: B sequences of T tokens each, E embedding width, D channels of a state, N numbers of each, W taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from slm_core.architectures import Activation, Mamba2Spec, MambaSpec
from slm_native.kernels.parameters import Linear, Norm
from slm_native.kv import Array

if TYPE_CHECKING:
    from slm_native.kernels.kernelset import KernelSet


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ShortConv:
    """The weights of a gated short convolution."""

    project: Linear  # (3E, E)
    taps: Array  # [W, E]
    output: Linear  # (E, E)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Mamba:
    """The weights of a selective state space layer."""

    spec: MambaSpec
    project: Linear  # (2D, E)
    taps: Array  # [W, D]
    conv_bias: Array  # [D]
    select: Linear  # (R + 2N, D)
    norms: Sequence[Norm | None]  # of step sizes [R], b [N] and c [N]
    steps: Linear  # (D, R)
    a: Array  # [D, N]
    d: Array  # [D]
    output: Linear  # (E, D)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Mamba2:
    """The weights of a selective state space layer with heads."""

    spec: Mamba2Spec
    project: Linear  # (D + D + 2GN + H, E)
    taps: Array  # [W, D + 2GN]
    conv_bias: Array | None  # [D + 2GN]
    step_bias: Array  # [H]
    a: Array  # [H, 1]
    d: Array  # [H, 1]
    norm: Norm | None  # [G, D / G]
    output: Linear  # (E, D)


StateWeights: TypeAlias = ShortConv | Mamba | Mamba2


def state_layer(
    kernels: KernelSet,
    weights: StateWeights,
    x: Array,
    norm: Norm | None,
    residual: Array,
    scale: float,
    before: Sequence[Array],
) -> tuple[Array, tuple[Array, ...]]:
    """See ``KernelSet.state_layer``."""
    (projected,) = kernels.project(x, norm, [weights.project])
    several = projected.reshape(len(before[0]), -1, projected.shape[-1])
    y, after = between_products(kernels, weights, several, before)
    y = y.reshape(len(x), -1)
    if scale == 1:
        return kernels.add_product(residual, y, weights.output), after
    return residual + kernels.linear(y, weights.output) * scale, after


def between_products(
    kernels: KernelSet, weights: StateWeights, projected: Array, before: Sequence[Array]
) -> tuple[Array, tuple[Array, ...]]:
    """What a layer makes of its first product [B, T, ...], and what it remembers after the last token."""
    if isinstance(weights, ShortConv):
        y, window = kernels.gated_convolution(projected, before[0], weights.taps)
        return y, (window,)
    if isinstance(weights, Mamba):
        y, *after = kernels.mamba(weights, projected, before[0], before[1])
    else:
        y, *after = kernels.mamba2(weights, projected, before[0], before[1])
    return y, tuple(after)


def gated_convolution(kernels: KernelSet, projected: Array, window: Array, taps: Array) -> tuple[Array, Array]:
    """See ``KernelSet.gated_convolution``."""
    width = projected.shape[-1] // 3
    b, c, x = (projected[:, :, i * width : (i + 1) * width] for i in range(3))
    y, window = kernels.short_convolution(b * x, window, taps)
    return c * y, window


def mamba(
    kernels: KernelSet, weights: Mamba, projected: Array, window: Array, state: Array
) -> tuple[Array, Array, Array]:
    """See ``KernelSet.mamba``."""
    spec = weights.spec
    x, z = projected[:, :, : spec.n_inner], projected[:, :, spec.n_inner :]
    x, window = kernels.short_convolution(x, window, weights.taps, weights.conv_bias)
    x = kernels.activate(x, Activation.SILU)  # [B, T, D]
    n_seqs, n_tokens, _ = x.shape
    selected = kernels.linear(x.reshape(n_seqs * n_tokens, -1), weights.select)  # [B * T, R + 2N]
    first, second = spec.n_rank, spec.n_rank + spec.n_state
    parts = (selected[:, :first] * 1, selected[:, first:second] * 1, selected[:, second:] * 1)
    steps, b, c = (kernels.normed(part, norm) for part, norm in zip(parts, weights.norms, strict=True))
    y, state = kernels.selective_scan(
        x.reshape(n_seqs, n_tokens, -1, 1),
        kernels.linear(steps, weights.steps).reshape(n_seqs, n_tokens, -1),
        weights.a,
        b.reshape(n_seqs, n_tokens, 1, -1),
        c.reshape(n_seqs, n_tokens, 1, -1),
        state,
    )
    y = y.reshape(n_seqs, n_tokens, -1) + x * weights.d
    return kernels.silu_mul(z, y), window, state


def mamba2(
    kernels: KernelSet, weights: Mamba2, projected: Array, window: Array, state: Array
) -> tuple[Array, Array, Array]:
    """See ``KernelSet.mamba2``."""
    spec = weights.spec
    n_seqs, n_tokens, _ = projected.shape
    end, inner, n_selected = spec.n_inner + spec.n_convolved, spec.n_inner, spec.n_groups * spec.n_state
    z, convolved, steps = projected[:, :, :inner], projected[:, :, inner:end], projected[:, :, end:]
    convolved, window = kernels.short_convolution(convolved, window, weights.taps, weights.conv_bias)
    convolved = kernels.activate(convolved, Activation.SILU)  # [B, T, D + 2GN]
    x = convolved[:, :, :inner].reshape(n_seqs, n_tokens, spec.n_heads, -1)
    b = convolved[:, :, inner : inner + n_selected].reshape(n_seqs, n_tokens, spec.n_groups, -1)
    c = convolved[:, :, inner + n_selected :].reshape(n_seqs, n_tokens, spec.n_groups, -1)
    y, state = kernels.selective_scan(x, steps + weights.step_bias, weights.a, b, c, state)
    y = kernels.silu_mul(z, (y + x * weights.d).reshape(n_seqs, n_tokens, -1))
    groups = y.reshape(n_seqs * n_tokens, spec.n_groups, -1)
    return kernels.normed(groups, weights.norm).reshape(n_seqs, n_tokens, -1), window, state
