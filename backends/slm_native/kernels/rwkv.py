"""RWKV-7 (Peng et al. 2025, https://arxiv.org/abs/2503.14456): time mixing, and channel mixing.

Shapes: B sequences of T tokens each, E embedding width, H heads of width P, so that E = H * P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from slm_core.architectures import Activation, Rwkv7Spec
from slm_native.kernels.parameters import Linear, Norm
from slm_native.kv import Array

if TYPE_CHECKING:
    from slm_native.kernels.kernelset import KernelSet

SLOWEST = -0.606531
"""Of the logarithm of a decay: -exp(-1/2)."""

RwkvState: TypeAlias = tuple[Array, Array, Array]
"""What a block remembers: the last token that time mixing saw [B, 1, E], its state [B, H, P, P], and the last token
that channel mixing saw [B, 1, E]."""


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
    shares: Array  # of the token before, for receptance, decay, key, value, rate and gate; [6, E]
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


@dataclass(frozen=True, slots=True, eq=False)
class RwkvBlock:
    """A whole block: both mixings, each behind its norm; what they make is added to what entered."""

    time_norm: Norm
    time: Rwkv7
    channel_norm: Norm
    channel: ChannelMix


def time_mix(
    kernels: KernelSet, weights: Rwkv7, x: Array, last: Array, state: Array, first_value: Array | None
) -> tuple[Array, Array, Array]:
    """See ``KernelSet.time_mix``."""
    n_seqs, n_tokens, n_embd = x.shape
    heads = (n_seqs, n_tokens, -1, weights.spec.head_dim)
    change = _before(kernels, x, last) - x

    def given(share: int) -> Array:
        """What a matrix takes: some of the token, some of that before it, [B * T, E]."""
        return (x + change * weights.shares[share]).reshape(-1, n_embd)

    r, k, v = (
        kernels.linear(given(share), matrix)
        for share, matrix in ((0, weights.receptance), (2, weights.key), (3, weights.value))
    )
    log_decay = kernels.sigmoid(_low_rank(kernels, weights.decay, given(1), tanh=True)) * SLOWEST
    values = v
    if weights.first_value is not None:
        values = v + (first_value - v) * kernels.sigmoid(_low_rank(kernels, weights.first_value, given(3)))
    rate = kernels.sigmoid(_low_rank(kernels, weights.rate, given(4)))
    inner = kernels.sigmoid(kernels.linear(given(5), weights.gate.down))
    gate = kernels.linear(inner, weights.gate.up)
    removed = kernels.normed((k * weights.key_removed).reshape(heads), weights.unit_norm)
    k = (k + k * weights.key_rate * (rate - 1)).reshape(heads)
    r, values, log_decay = r.reshape(heads), values.reshape(heads), log_decay.reshape(heads)
    y, state = kernels.delta_scan(r, log_decay, k, values, removed * -1, removed * rate.reshape(heads), state)
    y = kernels.normed(y, weights.head_norm) + kernels.inner(k * weights.bonus, r) * values
    return y.reshape(n_seqs, n_tokens, -1) * gate.reshape(n_seqs, n_tokens, -1), v, state


def channel_mix(kernels: KernelSet, weights: ChannelMix, x: Array, last: Array) -> Array:
    """See ``KernelSet.channel_mix``."""
    given = x + (_before(kernels, x, last) - x) * weights.share
    inner = kernels.activate(kernels.linear(given.reshape(-1, x.shape[-1]), weights.up), Activation.RELU_SQUARED)
    return kernels.linear(inner, weights.down).reshape(x.shape)


def _before(kernels: KernelSet, x: Array, last: Array) -> Array:
    """Of each token [B, T, E] the one before it."""
    return kernels.concatenated([last, x], axis=1)[:, : x.shape[1]]


def _low_rank(kernels: KernelSet, weights: LowRank, x: Array, *, tanh: bool = False) -> Array:
    inner = kernels.linear(x, weights.down)
    return kernels.linear(kernels.softcap(inner, 1.0) if tanh else inner, weights.up) + weights.base
