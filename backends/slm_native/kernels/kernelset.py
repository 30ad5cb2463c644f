"""The seam between the transformer and the code that computes it.

A kernel set is chosen once, when a model is loaded (``select_kernels``). The transformer prepares each weight once and
from then on calls only the steps below, so that a tier may keep weights packed or fuse what lies inside a step. A step
that a tier can only compute fast together with its neighbours is added here as the composition of those neighbours,
and that tier overrides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from slm_core.architectures import AnyActivation, NormKind
from slm_native.kernels import recurrent, rwkv
from slm_native.kernels.by_head import ByHead, SteppedByHead
from slm_native.kernels.mixtures import Mixture, SteppedMixture
from slm_native.kernels.parameters import (
    PLAIN,
    Experts,
    FeedForward,
    Linear,
    Norm,
    Rotation,
    Scoring,
    Span,
)
from slm_native.kernels.primitives import Primitives
from slm_native.kernels.recurrent import Mamba, Mamba2, StateWeights
from slm_native.kernels.rwkv import ChannelMix, Rwkv7
from slm_native.kv import Array, BatchPlan, KvLayer

if TYPE_CHECKING:
    from slm_native.steps import Step

_SCORES_AT_A_TIME = 1 << 22  # 16 MiB of float32, however long the prompt


class KernelSet(Primitives):
    """The arithmetic of a transformer. Holds no state that a step changes visibly, so threads may share it.

    An ``Array`` is a float32 array in the tier's own memory: NumPy's, or a tensor on a device. The transformer knows of
    it only that it adds, multiplies, reshapes and has a length and a shape; whatever else is done to it is a step here.
    It comes from a step or ``from_host``, and ``to_host`` reads it back.

    Shapes: T tokens in the batch, S positions held, H query heads, K key/value heads, D head width. No step changes its
    arguments, and every result is a new array. Sums may be made in another order when T changes (a BLAS takes other
    paths for a vector and for a matrix), so a token alone and the same token in a batch agree within float32 rounding,
    not bit for bit.
    """

    def short_convolution(self, x: Array, before: Array, taps: Array, bias: Array | None = None) -> tuple[Array, Array]:
        """Each channel's weighted sum of its last W values.

        Args:
            x: [B, T, C] of B sequences with T tokens each.
            before: what came before them, oldest first, [B, W - 1, C].
            taps: the weights of the oldest value, then of later ones, [W, C].
            bias: [C].

        Returns:
            The sums [B, T, C], and what comes before the next tokens.
        """
        n_tokens = x.shape[1]
        held = self.concatenated([before, x], axis=1)
        y = held[:, :n_tokens] * taps[0]
        for i in range(1, len(taps)):
            y = y + held[:, i : i + n_tokens] * taps[i]
        return y if bias is None else y + bias, held[:, n_tokens:] * 1  # a copy, which keeps no more than itself

    def gated_convolution(self, projected: Array, window: Array, taps: Array) -> tuple[Array, Array]:
        """A gated short convolution, ``c * convolution(b * x)``, between its matrices.

        Args:
            projected: b, c and x side by side, [B, T, 3E].
            window: values of ``b * x`` before the first token [B, W - 1, E].
            taps: see ``short_convolution``, [W, E].

        Returns:
            [B, T, E], and the window after the last token.
        """
        return recurrent.gated_convolution(self, projected, window, taps)

    def mamba(self, weights: Mamba, projected: Array, window: Array, state: Array) -> tuple[Array, Array, Array]:
        """Mamba between its input and its output matrix.

        Args:
            weights: of the layer.
            projected: what the convolution takes, and the gate, [B, T, 2D].
            window: of the convolution before the first token [B, W - 1, D].
            state: likewise [B, D, 1, N].

        Returns:
            [B, T, D], the window and the state after the last token.
        """
        return recurrent.mamba(self, weights, projected, window, state)

    def mamba2(self, weights: Mamba2, projected: Array, window: Array, state: Array) -> tuple[Array, Array, Array]:
        """``mamba`` with heads: of [B, T, D + C + H], with a window [B, W - 1, C] and a state [B, H, P, N]."""
        return recurrent.mamba2(self, weights, projected, window, state)

    def state_layer(
        self,
        weights: StateWeights,
        x: Array,
        norm: Norm | None,
        residual: Array,
        scale: float,
        before: Sequence[Array],
    ) -> tuple[Array, tuple[Array, ...]]:
        """A layer with a state from its norm to its output matrix.

        Args:
            weights: of the layer.
            x: tokens of B sequences, one after another, [B * T, E].
            norm: before its first product.
            residual: [B * T, E].
            scale: on what the layer makes.
            before: what it remembers: a window [B, W - 1, ...], and all but a short convolution a state.

        Returns:
            ``residual`` with what the layer makes of ``x``, and what it remembers after the last token.
        """
        return recurrent.state_layer(self, weights, x, norm, residual, scale, before)

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
        return rwkv.time_mix(self, weights, x, last, state, first_value)

    def channel_mix(self, weights: ChannelMix, x: Array, last: Array) -> Array:
        """RWKV-7's channel mixing of tokens ``x``, normalized, [B, T, E], after ``last`` [B, 1, E]: [B, T, E]."""
        return rwkv.channel_mix(self, weights, x, last)

    def fuse(self, steps: Sequence[Step]) -> Sequence[Step]:
        """The same steps, in fewer calls where this tier has some: one peephole pass over neighbours.

        Args:
            steps: of all layers of a model, in order.
        """
        return steps

    def normed(self, x: Array, norm: Norm | None) -> Array:
        """``x`` normalized, or as it is where there is no norm."""
        if norm is None:
            return x
        if norm.kind is NormKind.LAYER:
            return self.layer_norm(x, norm.weight, norm.bias, norm.eps)
        return self.rms_norm(x, norm.weight, norm.eps)

    def linear(self, x: Array, linear: Linear) -> Array:
        """``x @ weight.T * scale + bias``: [T, in] to [T, out]."""
        if linear.scale is None:
            return self.matmul(x, linear.weight, linear.bias)
        y = self.matmul(x, linear.weight) * linear.scale
        return y if linear.bias is None else y + linear.bias

    def project(self, x: Array, norm: Norm | None, linears: Sequence[Linear]) -> Sequence[Array]:
        """``linear`` of ``x``, normalized, with each of several matrices."""
        normed = self.normed(x, norm)
        return [self.linear(normed, linear) for linear in linears]

    def add_product(self, residual: Array, x: Array, linear: Linear) -> Array:
        """``residual + linear(x)``: [T, out]."""
        return residual + self.linear(x, linear)

    def gate_up(
        self,
        x: Array,
        norm: Norm | None,
        gate: Linear | None,
        up: Linear,
        activation: AnyActivation,
        threshold: float | None = None,
    ) -> Array:
        """The inner values [T, F] of a feed-forward layer, of ``x`` normalized.

        Args:
            x: [T, E].
            norm: of ``x``.
            gate: (F, E).
            up: (F, E).
            activation: of the gate, or of what ``up`` makes where there is none.
            threshold: see ``above_threshold``, through which the gate goes before its activation.

        Raises:
            ValueError: a threshold without a gate.
        """
        if gate is None and threshold is not None:
            raise ValueError("a threshold without a gate")
        normed = self.normed(x, norm)
        inner = self.linear(normed, up)
        if gate is None:
            return self.activate(inner, activation)
        gates = self.linear(normed, gate)
        return self.gated(gates if threshold is None else self.above_threshold(gates, threshold), inner, activation)

    def mixed(self, arrays: Sequence[Array], shares: Array) -> Sequence[Array]:
        """Each of N arrays [T, width] and the sum of all times its N columns of ``shares`` [T, N * N]."""
        n, found = len(arrays), []
        for i, each in enumerate(arrays):
            for j, other in enumerate(arrays):
                each = each + other * shares[:, i * n + j : i * n + j + 1]
            found.append(each)
        return found

    def part_embeddings(
        self, made: Array, given: Array, norm: Norm, made_share: float, given_share: float
    ) -> Sequence[Array]:
        """Each part [T, P] of rows [T, L*P]: what is made, normalized, times its share, and what is given times its."""
        width = norm.weight.shape[0]
        normed = self.normed(made.reshape(-1, width), norm).reshape(made.shape)
        both = normed * made_share + given * given_share
        return [both[:, start : start + width] * 1 for start in range(0, both.shape[1], width)]

    def feed_forward(self, x: Array, weights: FeedForward, activation: AnyActivation) -> Array:
        """What a feed-forward layer makes of ``x``: [T, E] to [T, E]."""
        return self.linear(self.gate_up(x, None, weights.gate, weights.up, activation), weights.down)

    def mixture(self, experts: Experts) -> Mixture:
        """A layer of experts, prepared once and run for each batch."""
        return SteppedMixture(self, experts)

    def by_head(self, linears: Sequence[Linear]) -> ByHead:
        """A matrix for each head, prepared once and run for each batch."""
        return SteppedByHead(self, linears)

    def heads(self, flat: Array, width: int, norm: Norm | None = None, rotation: Rotation | None = None) -> Array:
        """Heads of ``flat`` [T, heads * D], normalized over what the norm's weight covers, and rotated: [T, heads, D].

        Args:
            flat: heads side by side.
            width: of a head, D.
            norm: its weight covers a head [D], each head by itself [heads, D], or all of them as one [heads * D].
            rotation: by what; None where heads stay.
        """
        if norm is not None and norm.weight.shape == flat.shape[1:]:
            flat, norm = self.normed(flat, norm), None
        heads = self.normed(flat.reshape(len(flat), -1, width), norm)
        return heads if rotation is None else self.rope(heads, rotation.cos, rotation.sin, rotation.style)

    def store(
        self,
        cache: KvLayer,
        plan: BatchPlan,
        k: Array,
        v: Array,
        width: int,
        norm: Norm | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        """Write keys, as ``heads`` makes them, and values [T, K * D] where ``plan`` says."""
        cache.write(plan.pages, plan.slots, self.heads(k, width, norm, rotation), self.heads(v, width))

    def attention_over_pages(
        self,
        q: Array,
        cache: KvLayer,
        pages: Array,
        n_held: int,
        scale: float,
        scoring: Scoring = PLAIN,
        *,
        both_ways: bool = False,
    ) -> Array:
        """``attention`` with keys and values that lie in the KV cache, so many queries at a time.

        Args:
            q: [T, H, D], the last T of the positions held.
            cache: one layer of the cache; it holds the keys and values of these tokens, too.
            pages: where the sequence's tokens lie.
            n_held: positions held, S.
            scale: factor on ``q · k``.
            scoring: what else is done with scores.
            both_ways: whether the queries are a span.

        Returns:
            [T, H, D].
        """
        n_tokens, n_heads, _ = q.shape
        k, v = cache.keys(pages, n_held), cache.values(pages, n_held)
        mixed = np.empty_like(q)
        step = max(1, _SCORES_AT_A_TIME // (n_heads * n_held))
        for start in range(0, n_tokens, step):
            stop, position = min(start + step, n_tokens), n_held - n_tokens + start
            first, last, span = _first_seen(position, scoring.window), n_held - n_tokens + stop, None
            if both_ways:
                first, last = min(first, n_held - n_tokens), n_held
                span = Span(n_held - n_tokens - first, position - first)
            mixed[start:stop] = self.attention(q[start:stop], k[first:last], v[first:last], scale, scoring, span)
        return mixed

    def attention_over_runs(
        self, q: Array, cache: KvLayer, plan: BatchPlan, scale: float, scoring: Scoring = PLAIN
    ) -> Array:
        """``attention_over_pages`` for each sequence of a batch.

        Args:
            q: [T, H, D].
            cache: one layer of the cache; it holds the keys and values of these tokens, too.
            plan: what ``place`` gave.
            scale: factor on ``q · k``.
            scoring: what else is done with scores.

        Returns:
            [T, H, D].
        """
        mixed = np.empty_like(q)
        for run in plan.runs:
            mixed[run.rows] = self.attention_over_pages(
                q[run.rows], cache, run.pages, run.n_held, scale, scoring, both_ways=run.both_ways
            )
        return mixed


def _first_seen(position: int, window: int | None) -> int:
    """The first position that a query at ``position`` sees."""
    return 0 if window is None else max(0, position - window + 1)
