"""The operations of a transformer. ``recurrent``, ``rwkv`` and ``altup`` have the operations of some families."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import AnyActivation, NormKind, RopeStyle
from slm_native.kernels.parameters import (
    PLAIN,
    BlockRange,
    FeedForward,
    LayerPositions,
    Linear,
    Norm,
    Rotation,
    Scoring,
    Weight,
)
from slm_native.kv import Array, BatchPlan, KvLayer, Run

_SCORES_AT_A_TIME = 1 << 22  # 16 MiB of float32, however long the prompt


class Ops(ABC):
    """The operations of every tier: abstract ones, and compositions that a tier may override with a fused version.

    Steps only add, multiply and reshape an ``Array``, and read its length and shape; everything else is an operation
    here.

    Shapes: T tokens in the batch, S positions held, H query heads, K key/value heads, D head width. Operations never
    change their arguments, and every result is a new array. The order of sums may depend on T (a BLAS has different
    code for vectors and matrices), so a token alone and the same token in a batch agree within float32 rounding, not
    bit for bit. Operations are thread-safe.
    """

    takes_bias: bool = False
    """Whether attention adds the biases of keys."""

    @abstractmethod
    def rows(self, x: Array, which: slice | NDArray[Any]) -> Array:
        """The selected rows of ``x``: a slice, NumPy ids, or a NumPy mask [T]."""

    @abstractmethod
    def concatenated(self, parts: Sequence[Array], axis: int = 0) -> Array:
        """Arrays concatenated along an axis."""

    @abstractmethod
    def embed(self, weight: Weight, token_ids: NDArray[np.int32] | Array) -> Array:
        """The rows ``token_ids`` [T] (NumPy, or from ``from_host``) of an embedding matrix: [T, in].

        Raises:
            IndexError: a NumPy id outside 0 .. n_out - 1.
        """

    @abstractmethod
    def matmul(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        """``x @ weight.T + bias``: [T, in] to [T, out]; ``bias`` is [out]."""

    def normed(self, x: Array, norm: Norm | None) -> Array:
        """``x`` normalized, or unchanged without a norm."""
        if norm is None:
            return x
        if norm.kind is NormKind.LAYER:
            return self.layer_norm(x, norm.weight, norm.bias, norm.eps)
        return self.rms_norm(x, norm.weight, norm.eps)

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """``x / sqrt(mean(x²) + eps) * weight`` over the last axis; ``weight`` is [width]."""

    @abstractmethod
    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
        """``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`` over the last axis.

        Args:
            x: [T, width] or [T, heads, D].
            weight: [width], or [heads, D].
            bias: like ``weight``; None for none.
            eps: added to the variance.
        """

    def linear(self, x: Array, linear: Linear) -> Array:
        """``x @ weight.T * scale + bias``, and ``x @ a.T @ b.T`` of an adapter: [T, in] to [T, out]."""
        if linear.scale is None:
            y = self.matmul(x, linear.weight, linear.bias)
        else:
            y = self.matmul(x, linear.weight) * linear.scale
            y = y if linear.bias is None else y + linear.bias
        return y if linear.lora is None else y + self.matmul(self.matmul(x, linear.lora.a), linear.lora.b)

    def project(self, x: Array, norm: Norm | None, linears: Sequence[Linear]) -> Sequence[Array]:
        """Normalize ``x``, then apply ``linear`` with each of several matrices."""
        normed = self.normed(x, norm)
        return [self.linear(normed, linear) for linear in linears]

    def add_product(self, residual: Array, x: Array, linear: Linear) -> Array:
        """``residual + linear(x)``: [T, out]."""
        return residual + self.linear(x, linear)

    def heads(self, flat: Array, width: int, norm: Norm | None = None, rotation: Rotation | None = None) -> Array:
        """Split ``flat`` [T, heads * D] into heads, normalize and rotate them: [T, heads, D].

        Args:
            flat: heads side by side.
            width: D, the width of a head.
            norm: its weight is for one head [D], for each head [heads, D], or for all heads as one row [heads * D].
            rotation: RoPE's cosines and sines; None without RoPE.
        """
        if norm is not None and norm.weight.shape == flat.shape[1:]:
            flat, norm = self.normed(flat, norm), None
        heads = self.normed(flat.reshape(len(flat), -1, width), norm)
        return heads if rotation is None else self.rope(heads, rotation.cos, rotation.sin, rotation.style)

    @abstractmethod
    def rope(self, x: Array, cos: Array, sin: Array, style: RopeStyle) -> Array:
        """Rotate the first R of each head's D values; the others are unchanged.

        Args:
            x: [T, H, D].
            cos: [T, R/2] cosines of each token's angles.
            sin: [T, R/2] sines of each token's angles.
            style: which values form a pair.
        """

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
        """Write keys (after ``heads``) and values [T, K * D] to the destinations of ``plan``."""
        cache.write(plan.pages, plan.slots, self.heads(k, width, norm, rotation), self.heads(v, width))

    def store_and_attend(
        self,
        cache: KvLayer,
        plan: BatchPlan,
        q: Array,
        k: Array,
        v: Array,
        width: int,
        norms: tuple[Norm | None, Norm | None],
        positions: LayerPositions,
        scale: float,
        scoring: Scoring = PLAIN,
    ) -> Array:
        """``store``, then ``attention_over_runs`` with the queries after ``heads``.

        Args:
            cache: one layer of the cache.
            plan: the result of ``place``.
            q: [T, H * D].
            k: [T, K * D].
            v: [T, K * D].
            width: D.
            norms: norms of queries and of keys.
            positions: RoPE, and a factor on queries.
            scale: factor on ``q · k``.
            scoring: window, soft cap, ALiBi and sinks.

        Returns:
            [T, H, D].
        """
        self.store(cache, plan, k, v, width, norms[1], positions.rotation)
        heads = self.heads(q, width, norms[0], positions.rotation)
        if positions.temperature is not None:
            heads = heads * positions.temperature
        return self.attention_over_runs(heads, cache, plan, scale, scoring)

    def attention_over_runs(
        self, q: Array, cache: KvLayer, plan: BatchPlan, scale: float, scoring: Scoring = PLAIN
    ) -> Array:
        """``attention_over_pages`` for each sequence of a batch.

        Args:
            q: [T, H, D].
            cache: one layer of the cache, which already contains the keys and values of these tokens.
            plan: the result of ``place``.
            scale: factor on ``q · k``.
            scoring: window, soft cap, ALiBi and sinks.

        Returns:
            [T, H, D].
        """
        mixed = np.empty_like(q)
        for run in plan.runs:
            mixed[run.rows] = self.attention_of_run(q[run.rows], cache, run, scale, scoring)
        return mixed

    def attention_of_run(self, q: Array, cache: KvLayer, run: Run, scale: float, scoring: Scoring = PLAIN) -> Array:
        """``attention_over_pages`` for one sequence of a batch, with the biases of its keys."""
        biased = scoring if run.bias is None else replace(scoring, bias=run.bias)
        return self.attention_over_pages(
            q, cache, run.pages, run.n_held, scale, biased, bidirectional=run.bidirectional
        )

    def attention_over_pages(
        self,
        q: Array,
        cache: KvLayer,
        pages: Array,
        n_held: int,
        scale: float,
        scoring: Scoring = PLAIN,
        *,
        bidirectional: bool = False,
    ) -> Array:
        """``attention`` with the keys and values of the KV cache, for a bounded number of queries at a time.

        Args:
            q: [T, H, D], the queries of the last T positions.
            cache: one layer of the cache, which already contains the keys and values of these tokens.
            pages: the sequence's pages.
            n_held: S, the number of positions on the pages.
            scale: factor on ``q · k``.
            scoring: window, soft cap, ALiBi, sinks and biases.
            bidirectional: whether the queries are a bidirectional block.

        Returns:
            [T, H, D].
        """
        n_tokens, n_heads, _ = q.shape
        k, v = cache.keys(pages, n_held), cache.values(pages, n_held)
        mixed = np.empty_like(q)
        step = max(1, _SCORES_AT_A_TIME // (n_heads * n_held))
        for start in range(0, n_tokens, step):
            stop, position = min(start + step, n_tokens), n_held - n_tokens + start
            first, last, block = _first_seen(position, scoring.window), n_held - n_tokens + stop, None
            if bidirectional:
                first, last = min(first, n_held - n_tokens), n_held
                block = BlockRange(n_held - n_tokens - first, position - first)
            seen = scoring if scoring.bias is None else replace(scoring, bias=scoring.bias[first:last])
            mixed[start:stop] = self.attention(q[start:stop], k[first:last], v[first:last], scale, seen, block)
        return mixed

    @abstractmethod
    def attention(
        self, q: Array, k: Array, v: Array, scale: float, scoring: Scoring = PLAIN, block: BlockRange | None = None
    ) -> Array:
        """Causal grouped-query attention of the last T of the S positions of one sequence.

        Args:
            q: [T, H, D]; query t is at position S - T + t and attends to positions up to its own, or to its block.
            k: [S, K, D], H a multiple of K; query head h reads key head h // (H / K).
            v: [S, K, D].
            scale: factor on ``q · k``.
            scoring: window, soft cap, ALiBi, sinks and biases.
            block: the queries' bidirectional block, if they are part of one.

        Returns:
            [T, H, D].
        """

    @abstractmethod
    def bidirectional_attention(self, q: Array, k: Array, v: Array, scale: float, scoring: Scoring = PLAIN) -> Array:
        """Bidirectional grouped-query attention within one sequence.

        Args:
            q: [T, H, D].
            k: [T, K, D].
            v: [T, K, D].
            scale: factor on ``q · k``.
            scoring: window, soft cap, ALiBi and sinks; a window is centred on the query.

        Returns:
            [T, H, D].
        """

    def gate_up(
        self,
        x: Array,
        norm: Norm | None,
        gate: Linear | None,
        up: Linear,
        activation: AnyActivation,
        threshold: float | None = None,
    ) -> Array:
        """The inner values [T, F] of a feed-forward layer: normalize ``x``, multiply by ``gate`` and ``up``, activate.

        Args:
            x: [T, E].
            norm: norm of ``x``.
            gate: (F, E); None without a gate.
            up: (F, E).
            activation: activation of the gate; without a gate, of the output of ``up``.
            threshold: apply ``above_threshold`` to the gate before its activation.

        Raises:
            ValueError: a threshold without a gate.
        """
        if gate is None and threshold is not None:
            raise ValueError("a threshold without a gate")
        if gate is None:
            return self.activate(self.linear(self.normed(x, norm), up), activation)
        gates, inner = self.project(x, norm, (gate, up))
        return self.gated(gates if threshold is None else self.above_threshold(gates, threshold), inner, activation)

    def feed_forward(self, x: Array, weights: FeedForward, activation: AnyActivation) -> Array:
        """A feed-forward layer: [T, E] to [T, E]."""
        return self.linear(self.gate_up(x, None, weights.gate, weights.up, activation), weights.down)

    @abstractmethod
    def silu_mul(self, gate: Array, up: Array) -> Array:
        """``gate * sigmoid(gate) * up``, elementwise: SwiGLU's activation."""

    @abstractmethod
    def activate(self, x: Array, activation: AnyActivation) -> Array:
        """The activation of a feed-forward layer without a gate, elementwise."""

    @abstractmethod
    def gated(self, gate: Array, up: Array, activation: AnyActivation) -> Array:
        """``activation(gate) * up``, elementwise: ``silu_mul`` for any activation."""

    @abstractmethod
    def sigmoid(self, x: Array) -> Array:
        """``1 / (1 + exp(-x))``."""

    @abstractmethod
    def softcap(self, x: Array, cap: float) -> Array:
        """``cap * tanh(x / cap)``."""

    @abstractmethod
    def above_threshold(self, x: Array, n_deviations: float) -> Array:
        """The excess over a row's mean plus ``n_deviations`` standard deviations, or 0.

        ``max(0, x - mean(x) - n_deviations * std(x))`` for each row of ``x`` [T, width]; ``std`` divides by ``width``.
        """

    @abstractmethod
    def clip(self, x: Array, limit: float) -> Array:
        """``x`` clamped to [-limit, limit]."""


def _first_seen(position: int, window: int | None) -> int:
    """The first position that a query at ``position`` attends to."""
    return 0 if window is None else max(0, position - window + 1)
