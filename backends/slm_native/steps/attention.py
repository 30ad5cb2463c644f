"""Attention: queries, keys and values, RoPE, the KV write, and the weighted sum of values.

Shapes: T tokens of the batch, E embedding width, H query heads, K key and value heads, D head width.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from slm_core.architectures import LatentSpec
from slm_native.kernels.parameters import Attention, LatentAttention, Linear, Norm, Scoring
from slm_native.kv import Array
from slm_native.steps.base import Hidden, PlanKind, Residual, Step, StepInputs, output_rows, shapes


@dataclass(frozen=True, slots=True, eq=False)
class AttentionStep(Step):
    """``x + output(heads(norm(x)))``, the base of all kinds of attention.

    Attributes:
        layer: number of the layer.
        is_last: whether it is the model's last layer.
        norm: norm of the layer's input [E].
        residual: adds the result to the residual stream.
        head_dim: D.
        scale: factor on q · k.
        scoring: window, soft cap, ALiBi and sinks.
        plan: the kind of plan of the layer.
        cache: index of the KV cache that the layer reads; None without a cache.
        has_temperature: whether queries are multiplied by a factor that depends on their position.
    """

    layer: int
    is_last: bool
    norm: Norm | None
    residual: Residual
    head_dim: int
    scale: float
    scoring: Scoring
    plan: PlanKind
    cache: int | None
    has_temperature: bool

    def run(self, x: Hidden, inputs: StepInputs) -> Hidden:
        """Attend, then multiply by the output matrix, for the rows of the output mask."""
        mixed, ops = self.mix(x, inputs), self.residual.ops  # [T, H*D]
        residual = output_rows(ops, x, inputs, is_last=self.is_last)
        if len(residual) == 0:
            return residual
        mixed = output_rows(ops, mixed, inputs, is_last=self.is_last)
        return self.residual.add_product(residual, mixed, self.output)

    @property
    @abstractmethod
    def output(self) -> Linear:
        """The output matrix (E, H*D)."""

    @abstractmethod
    def mix(self, x: Array, inputs: StepInputs) -> Array:
        """The outputs of all heads, side by side [T, H*D], for ``x`` [T, E]."""

    def attend(self, q: Array, inputs: StepInputs) -> Array:
        """Attend with queries [T, H, D] to the KV cache: [T, H, D]."""
        assert self.cache is not None, "a decoder's attention reads a cache"
        if (temperature := inputs.positions[self.layer].temperature) is not None:
            q = q * temperature
        cache, plan = inputs.caches[self.cache], inputs.plans[self.layer]
        return self.residual.ops.attention_over_runs(q, cache, plan, self.scale, self.scoring)


@dataclass(frozen=True, slots=True, eq=False)
class SelfAttention(AttentionStep):
    """Causal self-attention with grouped queries: H is a multiple of K.

    Attributes:
        weights: matrices of queries, keys, values and the output; norms per head.
        qkv_limit: queries, keys and values are clamped to [-qkv_limit, qkv_limit].
    """

    weights: Attention
    qkv_limit: float | None

    @property
    def output(self) -> Linear:
        """See ``AttentionStep``."""
        return self.weights.output

    def mix(self, x: Array, inputs: StepInputs) -> Array:
        """Project, rotate, write keys and values to the cache, attend."""
        assert self.cache is not None, "it keeps keys and values"
        ops, weights, width = self.residual.ops, self.weights, self.head_dim
        cache, plan, positions = inputs.caches[self.cache], inputs.plans[self.layer], inputs.positions[self.layer]
        q, k, v = self.project(x)  # [T, H*D], [T, K*D], [T, K*D]
        norms = weights.q_norm, weights.k_norm
        # RoPE of keys and the KV write (store), RoPE of queries (heads), then softmax(q · k) · v (attention_over_runs)
        mixed = ops.store_and_attend(cache, plan, q, k, v, width, norms, positions, self.scale, self.scoring)
        return mixed.reshape(len(x), -1)  # [T, H, D] to [T, H*D]

    def project(self, x: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values: clamped (DBRX, MPT), values normalized, or keys used as values (gemma4)."""
        ops, weights = self.residual.ops, self.weights
        assert weights.k is not None, "it has keys of its own"
        linears = (weights.q, weights.k) if weights.v is None else (weights.q, weights.k, weights.v)
        q, k, *values = ops.project(x, self.norm, linears)
        v = values[0] if values else k
        if self.qkv_limit is not None:
            q, k, v = (ops.clip(flat, self.qkv_limit) for flat in (q, k, v))
        if weights.v_norm is not None:
            v = ops.heads(v, self.head_dim, weights.v_norm).reshape(len(v), -1)
        return q, k, v

    def describe(self) -> str:
        """See ``Step``."""
        weights = self.weights
        return "attention " + shapes({"q": weights.q, "k": weights.k, "v": weights.v, "output": weights.output})


@dataclass(frozen=True, slots=True, eq=False)
class SharedKvAttention(AttentionStep):
    """Attention to the keys and values of an earlier layer (gemma3n, gemma4).

    Attributes:
        weights: matrices of queries and the output.
    """

    weights: Attention

    @property
    def output(self) -> Linear:
        """See ``AttentionStep``."""
        return self.weights.output

    def mix(self, x: Array, inputs: StepInputs) -> Array:
        """Project and rotate queries, attend."""
        ops, rotation = self.residual.ops, inputs.positions[self.layer].rotation
        (q,) = ops.project(x, self.norm, (self.weights.q,))
        q = ops.heads(q, self.head_dim, self.weights.q_norm, rotation)
        return self.attend(q, inputs).reshape(len(x), -1)

    def describe(self) -> str:
        """See ``Step``."""
        return "attention (another layer's KV) " + shapes({"q": self.weights.q, "output": self.weights.output})


@dataclass(frozen=True, slots=True, eq=False)
class MultiHeadLatentAttention(AttentionStep):
    """Multi-head latent attention (MLA) with its up-projections absorbed: all heads attend to one latent per token.

    R is the width of a query's rotated part, N of its other part, C of the latent, U of a head's output; D is R + C.

    Attributes:
        weights: the matrices and norms of the layer.
        latent: widths of the latent.
    """

    weights: LatentAttention
    latent: LatentSpec

    @property
    def output(self) -> Linear:
        """See ``AttentionStep``."""
        return self.weights.output

    def mix(self, x: Array, inputs: StepInputs) -> Array:
        """Project, rotate, write the latents, attend to them, and expand each head's sum of latents."""
        ops, rotation = self.residual.ops, inputs.positions[self.layer].rotation
        assert self.cache is not None, "latents are kept"
        q, latents = self.queries_and_latents(x)
        keys = ops.heads(latents, self.head_dim, None, rotation)  # [T, 1, R+C]
        cache, plan = inputs.caches[self.cache], inputs.plans[self.layer]
        cache.write(plan.pages, plan.slots, keys, keys)  # stored once; ``expand`` drops the rotated part of the sums
        mixed = self.attend(ops.heads(q, self.head_dim, None, rotation), inputs)  # [T, H, R+C]
        return self.expand(mixed).reshape(len(x), -1)

    def queries_and_latents(self, x: Array) -> tuple[Array, Array]:
        """Queries [T, H*(R+C)] and the key [T, R+C] that all heads share, before RoPE."""
        ops, weights, n_nope, n_rank = self.residual.ops, self.weights, self.latent.n_nope, self.latent.n_rank
        q, kv = ops.project(x, self.norm, (weights.q_down or weights.q, weights.kv_down))  # kv: [T, C+R]
        if weights.q_down is not None:
            (q,) = ops.project(q, weights.q_norm, (weights.q,))
        q = q.reshape(len(x), weights.k_up.n_heads, -1)  # [T, H, N+R]
        absorbed = weights.k_up.run(q[:, :, :n_nope])  # [T, H, C]
        queries = ops.concatenated([q[:, :, n_nope:], absorbed], axis=2)
        latent = ops.normed(kv[:, :n_rank] * 1, weights.kv_norm)
        return queries.reshape(len(x), -1), ops.concatenated([kv[:, n_rank:], latent], axis=1)

    def expand(self, mixed: Array) -> Array:
        """Multiply each head's sum of latents [T, H, R+C] by its value matrix: [T, H, U]."""
        return self.weights.v_up.run(mixed[:, :, mixed.shape[2] - self.latent.n_rank :])

    def describe(self) -> str:
        """See ``Step``."""
        w = self.weights
        return "latent attention " + shapes({"q_down": w.q_down, "q": w.q, "kv_down": w.kv_down, "output": w.output})


@dataclass(frozen=True, slots=True, eq=False)
class BidirectionalAttention(AttentionStep):
    """An encoder's attention: each token attends to its whole sequence; no cache.

    Attributes:
        weights: matrices of the layer.
    """

    weights: Attention

    @property
    def output(self) -> Linear:
        """See ``AttentionStep``."""
        return self.weights.output

    def mix(self, x: Array, inputs: StepInputs) -> Array:
        """Project, rotate, attend within each sequence."""
        ops, weights, width = self.residual.ops, self.weights, self.head_dim
        assert weights.k is not None and weights.v is not None, "no encoder's layers share keys"
        rotation, runs = inputs.positions[self.layer].rotation, inputs.plans[self.layer].runs
        flat_q, flat_k, flat_v = ops.project(x, self.norm, (weights.q, weights.k, weights.v))
        q = ops.heads(flat_q, width, weights.q_norm, rotation)
        k, v = ops.heads(flat_k, width, weights.k_norm, rotation), ops.heads(flat_v, width)
        parts = []
        for run in runs:
            run_q, run_k, run_v = (ops.rows(heads, run.rows) for heads in (q, k, v))
            parts.append(ops.bidirectional_attention(run_q, run_k, run_v, self.scale, self.scoring))
        if len(parts) == 1:
            return parts[0].reshape(len(x), -1)
        indices = np.arange(len(x))
        order = np.concatenate([indices[run.rows] for run in runs])
        return ops.rows(ops.concatenated(parts), np.argsort(order)).reshape(len(x), -1)

    def describe(self) -> str:
        """See ``Step``."""
        weights = self.weights
        linears = {"q": weights.q, "k": weights.k, "v": weights.v, "output": weights.output}
        return "bidirectional attention " + shapes(linears)
