"""Layers with a state: what each makes of a batch, sequences of equal length at a time.

Shapes: B sequences of T tokens each, E embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from slm_native.kernels import ChannelMix, KernelSet, Mamba, Mamba2, Norm, Rwkv7, ShortConv
from slm_native.kv import Array
from slm_native.states import Parts, StateGroup, in_order

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
        return _time_mixed(kernels, weights, entered, before, group)
    if isinstance(weights, ShortConv):
        y, window = kernels.gated_convolution(entered, before[0], weights.taps)
        return y, (window,)
    if isinstance(weights, Mamba):
        y, window, state = kernels.mamba(weights, entered, *before)
    else:
        y, window, state = kernels.mamba2(weights, entered, *before)
    return y, (window, state)


def _time_mixed(kernels: KernelSet, weights: Rwkv7, x: Array, before: Parts, group: StateGroup) -> tuple[Array, Parts]:
    """The parts of its state are all but the last, which is channel mixing's."""
    last, state, _ = before
    is_first = weights.first_value is None
    y, values, state = kernels.time_mix(weights, x, last, state, None if is_first else group.carried[0])
    if is_first:
        group.carried.append(values)
    return y, (_last(x), state)


def channel_mixed(kernels: KernelSet, weights: ChannelMix, x: Array, groups: Sequence[StateGroup], layer: int) -> Array:
    """What channel mixing makes of ``x`` [T of the batch, E]; its part of the state goes into ``groups``."""
    made = []
    for group in groups:
        rows = kernels.rows(x, group.rows)
        several = rows.reshape(len(group.before), -1, rows.shape[-1])
        y = kernels.channel_mix(weights, several, group.parts(layer, kernels)[2])
        group.after[layer] = (*group.after[layer], _last(several))
        made.append(y.reshape(rows.shape))
    return in_order(kernels, groups, made)


def _last(x: Array) -> Array:
    """The last token of each sequence [B, 1, E]; a copy, which keeps no more than itself."""
    return x[:, -1:] * 1
