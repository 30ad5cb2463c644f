"""RWKV-7 (Peng et al. 2025, https://arxiv.org/abs/2503.14456): time mixing, and channel mixing.

Shapes: B sequences of T tokens each, E embedding width, H heads of width P, so that E = H * P.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

from slm_core.architectures import Activation, Rwkv7Spec
from slm_native.kernels.ops import Ops
from slm_native.kernels.parameters import Linear, Norm
from slm_native.kv import Array

SLOWEST = -0.606531
"""Of the logarithm of a decay: -exp(-1/2)."""

RwkvState: TypeAlias = tuple[Array, Array, Array]
"""What a block remembers: the last token that time mixing saw [B, 1, E], its state [B, H, P, P], and the last token
that channel mixing saw [B, 1, E]."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """A low-rank product: two matrices and a bias; the operation between them depends on the use."""

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
    """A whole block: both mixings, each after its norm; their outputs are added to the residual stream."""

    time_norm: Norm
    time: Rwkv7
    channel_norm: Norm
    channel: ChannelMix


class RwkvOps(Ops):
    """Operations of RWKV-7."""

    def time_mix(
        self, weights: Rwkv7, x: Array, last: Array, state: Array, first_value: Array | None
    ) -> tuple[Array, Array, Array]:
        """RWKV-7's time mixing up to its output matrix.

        Args:
            weights: of the layer.
            x: tokens, normalized, [B, T, E].
            last: the token before them [B, 1, E].
            state: before the first token [B, H, P, P].
            first_value: values [B * T, E] of the model's first layer; None in that.

        Returns:
            [B, T, E], the layer's own values [B * T, E], and the state after the last token.
        """
        n_seqs, n_tokens, n_embd = x.shape
        heads = (n_seqs, n_tokens, -1, weights.spec.head_dim)
        change = _before(self, x, last) - x

        def shifted(share: int) -> Array:
            """What a matrix takes: some of the token, some of that before it, [B * T, E]."""
            return (x + change * weights.shares[share]).reshape(-1, n_embd)

        r, k, v = (
            self.linear(shifted(share), matrix)
            for share, matrix in ((0, weights.receptance), (2, weights.key), (3, weights.value))
        )
        log_decay = self.sigmoid(_low_rank(self, weights.decay, shifted(1), tanh=True)) * SLOWEST
        values = v
        if weights.first_value is not None:
            values = v + (first_value - v) * self.sigmoid(_low_rank(self, weights.first_value, shifted(3)))
        rate = self.sigmoid(_low_rank(self, weights.rate, shifted(4)))
        inner = self.sigmoid(self.linear(shifted(5), weights.gate.down))
        gate = self.linear(inner, weights.gate.up)
        removed = self.normed((k * weights.key_removed).reshape(heads), weights.unit_norm)
        k = (k + k * weights.key_rate * (rate - 1)).reshape(heads)
        r, values, log_decay = r.reshape(heads), values.reshape(heads), log_decay.reshape(heads)
        y, state = self.delta_scan(r, log_decay, k, values, removed * -1, removed * rate.reshape(heads), state)
        y = self.normed(y, weights.head_norm) + self.inner(k * weights.bonus, r) * values
        return y.reshape(n_seqs, n_tokens, -1) * gate.reshape(n_seqs, n_tokens, -1), v, state

    def channel_mix(self, weights: ChannelMix, x: Array, last: Array) -> Array:
        """RWKV-7's channel mixing of tokens ``x``, normalized, [B, T, E], after ``last`` [B, 1, E]: [B, T, E]."""
        shifted = x + (_before(self, x, last) - x) * weights.share
        inner = self.activate(self.linear(shifted.reshape(-1, x.shape[-1]), weights.up), Activation.RELU_SQUARED)
        return self.linear(inner, weights.down).reshape(x.shape)

    @abstractmethod
    def delta_scan(
        self, r: Array, log_decay: Array, k: Array, v: Array, a: Array, b: Array, state: Array
    ) -> tuple[Array, Array]:
        """The generalized delta rule (RWKV-7, https://arxiv.org/abs/2503.14456, equation 17), token by token.

        ``state = state * exp(log_decay) + (state a) bᵀ + v kᵀ; y = state r`` for each head.

        Args:
            r: [B, T, H, P], as are all but the last.
            log_decay: of the columns of the state, at most 0.
            k: keys.
            v: values.
            a: what is taken out of the state, with its sign.
            b: where that goes.
            state: before the first token, [B, H, P, P], a row for each number of a value.

        Returns:
            y [B, T, H, P], and the state after the last token.
        """

    @abstractmethod
    def inner(self, x: Array, y: Array) -> Array:
        """The sum of ``x * y`` over the last axis, which stays, with one number."""


def _before(ops: Ops, x: Array, last: Array) -> Array:
    """Of each token [B, T, E] the one before it."""
    return ops.concatenated([last, x], axis=1)[:, : x.shape[1]]


def _low_rank(ops: Ops, weights: LowRank, x: Array, *, tanh: bool = False) -> Array:
    inner = ops.linear(x, weights.down)
    return ops.linear(ops.softcap(inner, 1.0) if tanh else inner, weights.up) + weights.base
