"""RWKV-7 (Peng et al. 2025, https://arxiv.org/abs/2503.14456): time mixing, and channel mixing.

Shapes: B sequences of T tokens each, E embedding width, H heads of width P, so that E = H * P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slm_core.architectures import Activation, Rwkv7Spec
from slm_native.kernels import KernelSet, Linear, Norm
from slm_native.kv import Array
from slm_native.states import Parts, StateGroup, in_order

_SLOWEST = -0.606531  # of the logarithm of a decay: -exp(-1/2)


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Two matrices one after another, and what is added; what lies between them depends on the use."""

    down: Linear  # (rank, E)
    up: Linear  # (E, rank)
    base: Array | None  # [E]


@dataclass(frozen=True, slots=True, eq=False)
class Rwkv7:
    """The weights of time mixing."""

    spec: Rwkv7Spec
    shares: Sequence[Array]  # of the token before, for receptance, decay, key, value, rate and gate; [6] of [E]
    receptance: Linear  # (E, E)
    key: Linear  # (E, E)
    value: Linear  # (E, E)
    decay: LowRank
    rate: LowRank
    first_value: LowRank | None  # how much of the first layer's values is mixed in; None in that layer
    gate: LowRank
    key_removed: Array  # [E]
    key_rate: Array  # [E]
    bonus: Array  # [H, P]
    unit_norm: Norm  # of a head's key, to length 1
    head_norm: Norm  # [H, P]
    output: Linear  # (E, E)


@dataclass(frozen=True, slots=True, eq=False)
class ChannelMix:
    """The weights of channel mixing: a feed-forward layer that sees a share of the token before, too."""

    share: Array  # [E]
    up: Linear  # (F, E)
    down: Linear  # (E, F)


def time_mixed(kernels: KernelSet, weights: Rwkv7, x: Array, before: Parts, group: StateGroup) -> tuple[Array, Parts]:
    """What time mixing makes of ``x`` [B, T, E], up to its output matrix; the parts of its state, but the last."""
    n_seqs, n_tokens, n_embd = x.shape
    heads = (n_seqs, n_tokens, -1, weights.spec.head_dim)
    shifted, last = _shifted(kernels, x, before[0])

    def given(share: int) -> Array:
        """What a matrix takes: some of the token, some of that before it, [B * T, E]."""
        return (x + (shifted - x) * weights.shares[share]).reshape(-1, n_embd)

    r, k, v = (
        kernels.linear(given(share), matrix)
        for share, matrix in ((0, weights.receptance), (2, weights.key), (3, weights.value))
    )
    log_decay = kernels.sigmoid(_low_rank(kernels, weights.decay, given(1), tanh=True)) * _SLOWEST
    v = _with_first_value(kernels, weights, v, given(3), group)
    rate = kernels.sigmoid(_low_rank(kernels, weights.rate, given(4)))
    inner = kernels.sigmoid(kernels.linear(given(5), weights.gate.down))
    gate = kernels.linear(inner, weights.gate.up)
    removed = kernels.normed((k * weights.key_removed).reshape(heads), weights.unit_norm)
    k = (k + k * weights.key_rate * (rate - 1)).reshape(heads)
    r, v, log_decay = r.reshape(heads), v.reshape(heads), log_decay.reshape(heads)
    y, state = kernels.delta_scan(r, log_decay, k, v, removed * -1, removed * rate.reshape(heads), before[1])
    y = kernels.normed(y, weights.head_norm) + kernels.inner(k * weights.bonus, r) * v
    return y.reshape(n_seqs, n_tokens, -1) * gate.reshape(n_seqs, n_tokens, -1), (last, state)


def channel_mixed(kernels: KernelSet, weights: ChannelMix, x: Array, groups: Sequence[StateGroup], layer: int) -> Array:
    """What channel mixing makes of ``x`` [T of the batch, E]; its part of the state goes into ``groups``."""
    made = []
    for group in groups:
        rows = kernels.rows(x, group.rows)
        several = rows.reshape(len(group.before), -1, rows.shape[-1])
        shifted, last = _shifted(kernels, several, group.parts(layer, kernels)[2])
        group.after[layer] = (*group.after[layer], last)
        given = (several + (shifted - several) * weights.share).reshape(rows.shape)
        inner = kernels.activate(kernels.linear(given, weights.up), Activation.RELU_SQUARED)
        made.append(kernels.linear(inner, weights.down))
    return in_order(kernels, groups, made)


def _shifted(kernels: KernelSet, x: Array, before: Array) -> tuple[Array, Array]:
    """Of each token [B, T, E] the one before it, and the last token [B, 1, E]."""
    n_tokens = x.shape[1]
    held = kernels.concatenated([before, x], axis=1)
    return held[:, :n_tokens], held[:, n_tokens:] * 1


def _low_rank(kernels: KernelSet, weights: LowRank, x: Array, *, tanh: bool = False) -> Array:
    inner = kernels.linear(x, weights.down)
    return kernels.linear(kernels.softcap(inner, 1.0) if tanh else inner, weights.up) + weights.base


def _with_first_value(kernels: KernelSet, weights: Rwkv7, v: Array, x: Array, group: StateGroup) -> Array:
    if weights.first_value is None:
        group.carried.append(v)
        return v
    return v + (group.carried[0] - v) * kernels.sigmoid(_low_rank(kernels, weights.first_value, x))
