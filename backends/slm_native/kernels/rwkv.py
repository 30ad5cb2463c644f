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
"""The lower bound of the logarithm of a decay: -exp(-1/2)."""

RwkvState: TypeAlias = tuple[Array, Array, Array]
"""The state of a block: the last token of time mixing [B, 1, E], the matrix state [B, H, P, P], and the last token of
channel mixing [B, 1, E]."""


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
    shares: Array  # of the previous token in receptance, decay, key, value, rate and gate; [6, E]
    receptance: Linear  # (E, E)
    key: Linear  # (E, E)
    value: Linear  # (E, E)
    decay: LowRank
    rate: LowRank
    first_value: LowRank | None  # the share of the first layer's values; None in the first layer
    gate: LowRank
    key_removed: Array  # [E]
    key_rate: Array  # [E]
    bonus: Array  # [H, P]
    unit_norm: Norm  # scales a head's key to length 1
    head_norm: Norm  # [H, P]
    output: Linear  # (E, E)


@dataclass(frozen=True, slots=True, eq=False)
class ChannelMix:
    """The weights of channel mixing: a feed-forward layer that also reads a share of the previous token."""

    share: Array  # [E]
    up: Linear  # (F, E)
    down: Linear  # (E, F)


@dataclass(frozen=True, slots=True, eq=False)
class RwkvBlock:
    """A block: time mixing and channel mixing, each after its norm and added to the residual stream."""

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
            weights: weights of time mixing.
            x: normalized tokens [B, T, E].
            last: the token before them [B, 1, E].
            state: state before the first token [B, H, P, P].
            first_value: the values [B * T, E] of the model's first layer; None in the first layer.

        Returns:
            [B, T, E], the layer's values [B * T, E], and the state after the last token.
        """
        n_seqs, n_tokens, n_embd = x.shape
        heads = (n_seqs, n_tokens, -1, weights.spec.head_dim)
        change = _before(self, x, last) - x

        def shifted(share: int) -> Array:
            """Interpolate between each token and the previous one, [B * T, E]."""
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
        """RWKV-7's channel mixing of normalized tokens ``x`` [B, T, E] after ``last`` [B, 1, E]: [B, T, E]."""
        shifted = x + (_before(self, x, last) - x) * weights.share
        inner = self.activate(self.linear(shifted.reshape(-1, x.shape[-1]), weights.up), Activation.RELU_SQUARED)
        return self.linear(inner, weights.down).reshape(x.shape)

    @abstractmethod
    def delta_scan(
        self, r: Array, log_decay: Array, k: Array, v: Array, a: Array, b: Array, state: Array
    ) -> tuple[Array, Array]:
        """The scan of the generalized delta rule (RWKV-7, https://arxiv.org/abs/2503.14456, equation 17).

        ``state = state * exp(log_decay) + (state a) bᵀ + v kᵀ; y = state r`` for each head.

        Args:
            r: receptance [B, T, H, P]; the next five have the same shape.
            log_decay: logarithm of the decay of the state's columns, at most 0.
            k: keys.
            v: values.
            a: negated keys of the values that are removed from the state.
            b: these keys, times the rate of the removal.
            state: state before the first token [B, H, P, P]; a row for each element of a value.

        Returns:
            y [B, T, H, P], and the state after the last token.
        """

    @abstractmethod
    def inner(self, x: Array, y: Array) -> Array:
        """The sum of ``x * y`` over the last axis, which is kept with length 1."""


def _before(ops: Ops, x: Array, last: Array) -> Array:
    """The token before each token, [B, T, E]."""
    return ops.concatenated([last, x], axis=1)[:, : x.shape[1]]


def _low_rank(ops: Ops, weights: LowRank, x: Array, *, tanh: bool = False) -> Array:
    inner = ops.linear(x, weights.down)
    return ops.linear(ops.softcap(inner, 1.0) if tanh else inner, weights.up) + weights.base
