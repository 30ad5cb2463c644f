"""The arithmetic of a transformer. Operations for some families are in ``recurrent``, ``rwkv`` and ``altup``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import AnyActivation, NormKind, RopeStyle
from slm_native.kernels.parameters import PLAIN, BlockRange, FeedForward, Linear, Norm, Rotation, Scoring, Weight
from slm_native.kv import Array, BatchPlan, KvLayer

_SCORES_AT_A_TIME = 1 << 22  # 16 MiB of float32, however long the prompt


class Ops(ABC):
    """What every tier computes: abstract operations, and compositions that a tier may fuse by overriding them.

    Steps know of an ``Array`` only that it adds, multiplies, reshapes and has a length and a shape; anything else is an
    operation here.

    Shapes: T tokens in the batch, S positions held, H query heads, K key/value heads, D head width. No operation
    changes its arguments, and every result is a new array. Sums may be made in another order when T changes (a BLAS
    takes other paths for a vector and for a matrix), so a token alone and the same token in a batch agree within
    float32 rounding, not bit for bit. No operation changes visible state, so threads may share it.
    """

    @abstractmethod
    def rows(self, x: Array, which: slice | NDArray[Any]) -> Array:
        """Some rows of ``x``: a slice, ids in NumPy, or a NumPy mask [T]."""

    @abstractmethod
    def concatenated(self, parts: Sequence[Array], axis: int = 0) -> Array:
        """Arrays one after another along an axis; the other axes are equal."""

    @abstractmethod
    def embed(self, weight: Weight, token_ids: NDArray[np.int32] | Array) -> Array:
        """Rows ``token_ids`` [T], in NumPy or where ``from_host`` has put them, of an embedding matrix: [T, in].

        Raises:
            IndexError: an id in NumPy outside 0 .. n_out - 1.
        """

    @abstractmethod
    def matmul(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        """``x @ weight.T + bias``: [T, in] to [T, out]; ``bias`` is [out]."""

    def normed(self, x: Array, norm: Norm | None) -> Array:
        """``x`` normalized, or unchanged if there is no norm."""
        if norm is None:
            return x
        if norm.kind is NormKind.LAYER:
            return self.layer_norm(x, norm.weight, norm.bias, norm.eps)
        return self.rms_norm(x, norm.weight, norm.eps)

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, which ``weight`` [width] matches."""

    @abstractmethod
    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
        """``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`` over the last axis.

        Args:
            x: [T, width] or [T, heads, D].
            weight: [width], or [heads, D].
            bias: of the same shape.
            eps: see above.
        """

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

    def heads(self, flat: Array, width: int, norm: Norm | None = None, rotation: Rotation | None = None) -> Array:
        """Heads of ``flat`` [T, heads * D], normalized over what the norm's weight covers, and rotated: [T, heads, D].

        Args:
            flat: heads side by side.
            width: of a head, D.
            norm: its weight covers a head [D], each head by itself [heads, D], or all of them as one [heads * D].
            rotation: the angles; None without RoPE.
        """
        if norm is not None and norm.weight.shape == flat.shape[1:]:
            flat, norm = self.normed(flat, norm), None
        heads = self.normed(flat.reshape(len(flat), -1, width), norm)
        return heads if rotation is None else self.rope(heads, rotation.cos, rotation.sin, rotation.style)

    @abstractmethod
    def rope(self, x: Array, cos: Array, sin: Array, style: RopeStyle) -> Array:
        """Rotate the first R of each head's D values; those beyond R pass through.

        Args:
            x: [T, H, D].
            cos: [T, R/2] cosines of each token's angles.
            sin: [T, R/2] sines of the same.
            style: which values make a pair.
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
        """Write keys, as ``heads`` makes them, and values [T, K * D] where ``plan`` says."""
        cache.write(plan.pages, plan.slots, self.heads(k, width, norm, rotation), self.heads(v, width))

    def attention_over_runs(
        self, q: Array, cache: KvLayer, plan: BatchPlan, scale: float, scoring: Scoring = PLAIN
    ) -> Array:
        """``attention_over_pages`` for each sequence of a batch.

        Args:
            q: [T, H, D].
            cache: one layer of the cache; it holds the keys and values of these tokens, too.
            plan: what ``place`` gave.
            scale: factor on ``q · k``.
            scoring: other operations on scores.

        Returns:
            [T, H, D].
        """
        mixed = np.empty_like(q)
        for run in plan.runs:
            mixed[run.rows] = self.attention_over_pages(
                q[run.rows], cache, run.pages, run.n_held, scale, scoring, bidirectional=run.bidirectional
            )
        return mixed

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
        """``attention`` with keys and values in the KV cache, for a bounded number of queries at a time.

        Args:
            q: [T, H, D], the last T of the positions held.
            cache: one layer of the cache; it also holds the keys and values of these tokens.
            pages: the sequence's pages.
            n_held: positions held, S.
            scale: factor on ``q · k``.
            scoring: other operations on scores.
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
            mixed[start:stop] = self.attention(q[start:stop], k[first:last], v[first:last], scale, scoring, block)
        return mixed

    @abstractmethod
    def attention(
        self, q: Array, k: Array, v: Array, scale: float, scoring: Scoring = PLAIN, block: BlockRange | None = None
    ) -> Array:
        """Causal attention of the last T of the S positions of one sequence, heads grouped (GQA).

        Args:
            q: [T, H, D]; query t is at position S - T + t and attends to positions up to its own, or to its block.
            k: [S, K, D], H a multiple of K; query head h reads key head h // (H / K).
            v: [S, K, D].
            scale: factor on ``q · k``.
            scoring: other operations on scores.
            block: the queries' bidirectional block, if they are part of one.

        Returns:
            [T, H, D].
        """

    @abstractmethod
    def attentiolongest_block(self, q: Array, k: Array, v: Array, scale: float, scoring: Scoring = PLAIN) -> Array:
        """Attention of all positions of one sequence to all of them, heads grouped (GQA).

        Args:
            q: [T, H, D].
            k: [T, K, D].
            v: [T, K, D].
            scale: factor on ``q · k``.
            scoring: other operations on scores; of a window, half lies to each side of a query.

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
        """The inner values [T, F] of a feed-forward layer, of ``x`` normalized.

        Args:
            x: [T, E].
            norm: of ``x``.
            gate: (F, E).
            up: (F, E).
            activation: of the gate, or of the output of ``up`` if there is none.
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

    def feed_forward(self, x: Array, weights: FeedForward, activation: AnyActivation) -> Array:
        """What a feed-forward layer makes of ``x``: [T, E] to [T, E]."""
        return self.linear(self.gate_up(x, None, weights.gate, weights.up, activation), weights.down)

    @abstractmethod
    def silu_mul(self, gate: Array, up: Array) -> Array:
        """``gate * sigmoid(gate) * up``, element by element: the activation of a gated feed-forward layer."""

    @abstractmethod
    def activate(self, x: Array, activation: AnyActivation) -> Array:
        """The activation of a feed-forward layer without a gate, element by element."""

    @abstractmethod
    def gated(self, gate: Array, up: Array, activation: AnyActivation) -> Array:
        """``activation(gate) * up``, element by element: ``silu_mul`` for any activation."""

    @abstractmethod
    def sigmoid(self, x: Array) -> Array:
        """``1 / (1 + exp(-x))``."""

    @abstractmethod
    def softcap(self, x: Array, cap: float) -> Array:
        """``cap * tanh(x / cap)``."""

    @abstractmethod
    def above_threshold(self, x: Array, n_deviations: float) -> Array:
        """The excess of a row's numbers over its mean plus this many standard deviations; 0 if there is none.

        The deviation is the root of the mean square: ``max(0, x - mean(x) - n_deviations * std(x))``, for x [T, width].
        """

    @abstractmethod
    def clip(self, x: Array, limit: float) -> Array:
        """``x``, but no further from 0 than ``limit``."""


def _first_seen(position: int, window: int | None) -> int:
    """The first position that a query at ``position`` sees."""
    return 0 if window is None else max(0, position - window + 1)
