"""Layers with a state: what each makes of a batch, sequences of equal length at a time.

Shapes: B sequences of T tokens each, E embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_native.kernels import (
    ChannelMix,
    FusedRwkv,
    KernelSet,
    Norm,
    Rwkv7,
    StateWeights,
    between_products,
)
from slm_native.kv import Array
from slm_native.states import Parts, StateGroup, in_order

Recurrent: TypeAlias = StateWeights | Rwkv7


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
    return between_products(kernels, weights, entered, before)


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


def added_by_state(
    kernels: KernelSet,
    weights: StateWeights,
    x: Array,
    norm: Norm | None,
    residual: Array,
    scale: float,
    group: StateGroup,
    layer: int,
) -> Array:
    """As ``KernelSet.state_layer``, of a batch whose sequences are one ``group``, in which the states after it go.

    Args:
        kernels: the arithmetic.
        weights: of the layer.
        x: what enters the block, [T of the batch, E].
        norm: the norm before the layer.
        residual: what its results are added to, likewise.
        scale: on these.
        group: the sequences.
        layer: which of the recurrent layers it is.
    """
    rows, before = group.rows, group.parts(layer, kernels)
    if isinstance(rows, slice):
        y, after = kernels.state_layer(weights, x, norm, residual, scale, before)
        group.after.append(after)
        return y
    given = kernels.rows(x, rows), norm, kernels.rows(residual, rows)
    y, after = kernels.state_layer(weights, *given, scale, before)
    group.after.append(after)
    return in_order(kernels, [group], [y])


def through_rwkv(
    kernels: KernelSet, blocks: FusedRwkv, x: Array, groups: Sequence[StateGroup], layers: Sequence[int]
) -> Array:
    """Run RWKV-7's blocks on ``x`` [T of the batch, E]; the states after the batch go into ``groups``.

    Args:
        kernels: the arithmetic.
        blocks: those of ``layers``.
        x: what enters the first.
        groups: the sequences of the batch.
        layers: which of the recurrent layers they are.
    """
    made = []
    for group in groups:
        rows = kernels.rows(x, group.rows)
        several, before = rows.reshape(len(group.before), -1, rows.shape[-1]), [group.parts(i, kernels) for i in layers]
        first_value = group.carried[0] if group.carried else None
        y, values, after = blocks.run(several, [(last, state, seen) for last, state, seen in before], first_value)
        if first_value is None:
            group.carried.append(values)
        group.after.extend(after)
        made.append(y.reshape(rows.shape))
    return in_order(kernels, groups, made)


class Seen(NamedTuple):
    """What channel mixing reads of a batch of which some tokens are wanted.

    Attributes:
        rows: the tokens that are wanted, those before them, and the last of each sequence, in the order of the batch.
        wanted: places in ``rows``.
        before: of the token before each of these, likewise; states before the batch stand behind, group by group.
        last: of each group, where the last tokens of its sequences are.
    """

    rows: NDArray[np.intp]
    wanted: NDArray[np.intp]
    before: NDArray[np.intp]
    last: Sequence[NDArray[np.intp]]


def seen_of(groups: Sequence[StateGroup], wanted: NDArray[np.bool_]) -> Seen:
    """What it reads, of a batch with tokens wanted [T of the batch]."""
    n_tokens, n_states = len(wanted), 0
    before, last = np.empty(n_tokens, np.intp), []
    for group in groups:
        tokens = np.arange(n_tokens)[group.rows].reshape(len(group.before), -1)  # [B, T]
        before[tokens[:, 1:]] = tokens[:, :-1]
        before[tokens[:, 0]] = n_tokens + n_states + np.arange(len(tokens))
        n_states += len(tokens)
        last.append(tokens[:, -1])
    chosen = np.flatnonzero(wanted)
    earlier = before[chosen]
    rows = np.unique(np.concatenate([chosen, earlier[earlier < n_tokens], *last]))
    places = np.concatenate([np.zeros(n_tokens, np.intp), len(rows) + np.arange(n_states)])
    places[rows] = np.arange(len(rows))
    return Seen(rows, places[chosen], places[earlier], [places[each] for each in last])


def channel_mixed_where(
    kernels: KernelSet, weights: ChannelMix, x: Array, groups: Sequence[StateGroup], layer: int, seen: Seen
) -> Array:
    """``channel_mixed`` of the tokens that are wanted alone; of ``x`` what is ``seen`` is given, [rows, E]."""
    states = [group.parts(layer, kernels)[2] for group in groups]  # [B, 1, E]
    for group, last in zip(groups, seen.last, strict=True):
        group.after[layer] = (*group.after[layer], kernels.rows(x, last).reshape(len(last), 1, -1))
    every = kernels.concatenated([x, *(state.reshape(len(state), -1) for state in states)])
    tokens, before = (kernels.rows(every, places) for places in (seen.wanted, seen.before))
    if len(tokens) == 0:
        return tokens
    one_each = len(tokens), 1, -1  # as sequences of one token
    return kernels.channel_mix(weights, tokens.reshape(one_each), before.reshape(one_each)).reshape(len(tokens), -1)


def _last(x: Array) -> Array:
    """The last token of each sequence [B, 1, E]; a copy, which keeps no more than itself."""
    return x[:, -1:] * 1
