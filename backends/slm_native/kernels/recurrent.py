"""Recurrent layers: their weights, and each layer as a composition of smaller operations.

Shapes: B sequences of T tokens each, E embedding width, D channels of a state, N numbers of each, W taps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slm_core.architectures import Activation, Mamba2Spec, MambaSpec
from slm_native.kernels.ops import Ops
from slm_native.kernels.parameters import Linear, Norm
from slm_native.kv import Array


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
    norms: Sequence[Norm | None]  # norms of step sizes [R], b [N] and c [N]
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


RecurrentWeights: TypeAlias = ShortConv | Mamba | Mamba2


class RecurrentOps(Ops):
    """Operations of recurrent layers."""

    def short_convolution(self, x: Array, before: Array, taps: Array, bias: Array | None = None) -> tuple[Array, Array]:
        """A causal convolution: for each channel a weighted sum of its last W values.

        Args:
            x: [B, T, C].
            before: the W - 1 values before ``x``, oldest first, [B, W - 1, C].
            taps: the weights, oldest value first, [W, C].
            bias: [C].

        Returns:
            The sums [B, T, C], and ``before`` of the next tokens.
        """
        n_tokens = x.shape[1]
        padded = self.concatenated([before, x], axis=1)
        y = padded[:, :n_tokens] * taps[0]
        for i in range(1, len(taps)):
            y = y + padded[:, i : i + n_tokens] * taps[i]
        return y if bias is None else y + bias, padded[:, n_tokens:] * 1  # a copy, so that ``padded`` can be freed

    @abstractmethod
    def selective_scan(self, x: Array, steps: Array, a: Array, b: Array, c: Array, state: Array) -> tuple[Array, Array]:
        """The scan of a selective state space (Gu and Dao 2023, https://arxiv.org/abs/2312.00752, algorithm 2).

        ``state = exp(step * a) * state + step * x * b; y = sum(state * c)``, with ``step = log(1 + exp(steps))``.
        A step size belongs to one of H heads of P channels, b and c to H / G heads. Mamba has P = 1.

        Args:
            x: [B, T, H, P].
            steps: [B, T, H].
            a: [H, N], or [H, 1] if all N decays of a channel are equal.
            b: [B, T, G, N], H a multiple of G.
            c: [B, T, G, N].
            state: state before the first token, [B, H, P, N].

        Returns:
            y [B, T, H, P], and the state after the last token.
        """

    def recurrent_layer(
        self,
        weights: RecurrentWeights,
        x: Array,
        norm: Norm | None,
        residual: Array,
        scale: float,
        before: Sequence[Array],
    ) -> tuple[Array, tuple[Array, ...]]:
        """A recurrent layer from its norm to its output matrix.

        Args:
            weights: weights of the layer.
            x: tokens of B sequences, one sequence after another, [B * T, E].
            norm: norm before the first product.
            residual: [B * T, E].
            scale: factor on the layer's output.
            before: state before the batch: the convolution's window [B, W - 1, ...], then the scan's state, if any.

        Returns:
            ``residual`` plus the layer's output for ``x``, and the state after the last token.
        """
        (projected,) = self.project(x, norm, [weights.project])
        several = projected.reshape(len(before[0]), -1, projected.shape[-1])
        y, after = self.between_products(weights, several, before)
        y = y.reshape(len(x), -1)
        if scale == 1:
            return self.add_product(residual, y, weights.output), after
        return residual + self.linear(y, weights.output) * scale, after

    def between_products(
        self, weights: RecurrentWeights, projected: Array, before: Sequence[Array]
    ) -> tuple[Array, tuple[Array, ...]]:
        """The layer between its input and output matrices [B, T, ...], and the state after the last token."""
        if isinstance(weights, ShortConv):
            y, window = self.gated_convolution(projected, before[0], weights.taps)
            return y, (window,)
        if isinstance(weights, Mamba):
            y, *after = self.mamba(weights, projected, before[0], before[1])
        else:
            y, *after = self.mamba2(weights, projected, before[0], before[1])
        return y, tuple(after)

    def gated_convolution(self, projected: Array, window: Array, taps: Array) -> tuple[Array, Array]:
        """A gated short convolution, ``c * convolution(b * x)``, between its input and output matrices.

        Args:
            projected: b, c and x side by side, [B, T, 3E].
            window: values of ``b * x`` before the first token [B, W - 1, E].
            taps: see ``short_convolution``, [W, E].

        Returns:
            [B, T, E], and the window after the last token.
        """
        width = projected.shape[-1] // 3
        b, c, x = (projected[:, :, i * width : (i + 1) * width] for i in range(3))
        y, window = self.short_convolution(b * x, window, taps)
        return c * y, window

    def mamba(self, weights: Mamba, projected: Array, window: Array, state: Array) -> tuple[Array, Array, Array]:
        """Mamba between its input and output matrices.

        Args:
            weights: weights of the layer.
            projected: the convolution's input and the gate, side by side, [B, T, 2D].
            window: the convolution's inputs before the first token [B, W - 1, D].
            state: state before the first token [B, D, 1, N].

        Returns:
            [B, T, D], and the window and the state after the last token.
        """
        spec = weights.spec
        x, z = projected[:, :, : spec.n_inner], projected[:, :, spec.n_inner :]
        x, window = self.short_convolution(x, window, weights.taps, weights.conv_bias)
        x = self.activate(x, Activation.SILU)  # [B, T, D]
        n_seqs, n_tokens, _ = x.shape
        selected = self.linear(x.reshape(n_seqs * n_tokens, -1), weights.select)  # [B * T, R + 2N]
        first, second = spec.n_rank, spec.n_rank + spec.n_state
        parts = (selected[:, :first] * 1, selected[:, first:second] * 1, selected[:, second:] * 1)
        steps, b, c = (self.normed(part, norm) for part, norm in zip(parts, weights.norms, strict=True))
        y, state = self.selective_scan(
            x.reshape(n_seqs, n_tokens, -1, 1),
            self.linear(steps, weights.steps).reshape(n_seqs, n_tokens, -1),
            weights.a,
            b.reshape(n_seqs, n_tokens, 1, -1),
            c.reshape(n_seqs, n_tokens, 1, -1),
            state,
        )
        y = y.reshape(n_seqs, n_tokens, -1) + x * weights.d
        return self.silu_mul(z, y), window, state

    def mamba2(self, weights: Mamba2, projected: Array, window: Array, state: Array) -> tuple[Array, Array, Array]:
        """Like ``mamba``, with ``projected`` [B, T, D + C + H], ``window`` [B, W - 1, C], ``state`` [B, H, P, N]."""
        spec = weights.spec
        n_seqs, n_tokens, _ = projected.shape
        end, inner, n_selected = spec.n_inner + spec.n_convolved, spec.n_inner, spec.n_groups * spec.n_state
        z, convolved, steps = projected[:, :, :inner], projected[:, :, inner:end], projected[:, :, end:]
        convolved, window = self.short_convolution(convolved, window, weights.taps, weights.conv_bias)
        convolved = self.activate(convolved, Activation.SILU)  # [B, T, D + 2GN]
        x = convolved[:, :, :inner].reshape(n_seqs, n_tokens, spec.n_heads, -1)
        b = convolved[:, :, inner : inner + n_selected].reshape(n_seqs, n_tokens, spec.n_groups, -1)
        c = convolved[:, :, inner + n_selected :].reshape(n_seqs, n_tokens, spec.n_groups, -1)
        y, state = self.selective_scan(x, steps + weights.step_bias, weights.a, b, c, state)
        y = self.silu_mul(z, (y + x * weights.d).reshape(n_seqs, n_tokens, -1))
        groups = y.reshape(n_seqs * n_tokens, spec.n_groups, -1)
        return self.normed(groups, weights.norm).reshape(n_seqs, n_tokens, -1), window, state
