"""Layers with a state: what each makes of a batch, up to its output matrix.

Shapes: B sequences of T tokens each, E embedding width, D channels of a state, N numbers of each, W taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slm_core.architectures import Activation, Mamba2Spec, MambaSpec
from slm_native.kernels import KernelSet, Linear, Norm
from slm_native.kv import Array
from slm_native.rwkv import Rwkv7, time_mixed
from slm_native.states import Parts, StateGroup, in_order


@dataclass(frozen=True, slots=True, eq=False)
class ShortConv:
    """The weights of a gated short convolution."""

    project: Linear  # (3E, E)
    taps: Sequence[Array]  # [W] of [E]
    output: Linear  # (E, E)


@dataclass(frozen=True, slots=True, eq=False)
class Mamba:
    """The weights of a selective state space layer."""

    spec: MambaSpec
    project: Linear  # (2D, E)
    taps: Sequence[Array]  # [W] of [D]
    conv_bias: Array  # [D]
    select: Linear  # (R + 2N, D)
    norms: Sequence[Norm | None]  # of step sizes [R], b [N] and c [N]
    steps: Linear  # (D, R)
    a: Array  # [D, N]
    d: Array  # [D]
    output: Linear  # (E, D)


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2:
    """The weights of a selective state space layer with heads."""

    spec: Mamba2Spec
    project: Linear  # (D + D + 2GN + H, E)
    taps: Sequence[Array]  # [W] of [D + 2GN]
    conv_bias: Array | None  # [D + 2GN]
    step_bias: Array  # [H]
    a: Array  # [H, 1]
    d: Array  # [H, 1]
    norm: Norm | None  # [G, D / G]
    output: Linear  # (E, D)


Recurrent: TypeAlias = ShortConv | Mamba | Mamba2 | Rwkv7


def mixed_by_state(
    kernels: KernelSet, weights: Recurrent, x: Array, norm: Norm | None, groups: Sequence[StateGroup], layer: int
) -> Array:
    """Run a layer; the states after the batch go into ``groups``.

    Args:
        kernels: the arithmetic.
        weights: of the layer.
        x: what enters the block, [T of the batch, E].
        norm: the norm before the layer.
        groups: the sequences of the batch.
        layer: which of the recurrent layers it is.

    Returns:
        What its output matrix takes, [T of the batch, width].
    """
    entered = _entered(kernels, weights, x, norm)
    made = []
    for group in groups:
        rows = kernels.rows(entered, group.rows)
        y, after = _step(kernels, weights, rows.reshape(len(group.before), -1, rows.shape[-1]), group, layer)
        group.after.append(after)
        made.append(y.reshape(len(rows), -1))
    return in_order(kernels, groups, made)


def _entered(kernels: KernelSet, weights: Recurrent, x: Array, norm: Norm | None) -> Array:
    """``x`` [T of the batch, E] as far as one product serves all sequences."""
    if isinstance(weights, Rwkv7):
        return kernels.normed(x, norm)
    (projected,) = kernels.project(x, norm, [weights.project])
    return projected


def _step(kernels: KernelSet, weights: Recurrent, entered: Array, group: StateGroup, layer: int) -> tuple[Array, Parts]:
    """One layer on sequences of equal length, [B, T, ...]."""
    before = group.parts(layer, kernels)
    if isinstance(weights, Rwkv7):
        return time_mixed(kernels, weights, entered, before, group)
    if isinstance(weights, ShortConv):
        return _short_conv(kernels, weights, entered, before)
    if isinstance(weights, Mamba):
        return _mamba(kernels, weights, entered, before)
    return _mamba2(kernels, weights, entered, before)


def _short_conv(kernels: KernelSet, weights: ShortConv, projected: Array, before: Parts) -> tuple[Array, Parts]:
    width = projected.shape[-1] // 3
    b, c, x = (projected[:, :, i * width : (i + 1) * width] for i in range(3))
    (window,) = before
    y, window = kernels.short_convolution(b * x, window, weights.taps)
    return c * y, (window,)


def _mamba(kernels: KernelSet, weights: Mamba, projected: Array, before: Parts) -> tuple[Array, Parts]:
    spec, (window, state) = weights.spec, before
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
    return kernels.silu_mul(z, y), (window, state)


def _mamba2(kernels: KernelSet, weights: Mamba2, projected: Array, before: Parts) -> tuple[Array, Parts]:
    spec, (window, state) = weights.spec, before
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
    return kernels.normed(groups, weights.norm).reshape(n_seqs, n_tokens, -1), (window, state)
