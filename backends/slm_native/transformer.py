"""The forward pass of a decoder-only transformer, the same for every architecture and every kernel set.

Shapes: T tokens of the batch, E embedding width, H query heads, K key and value heads, D head width, F feed-forward
width, V vocabulary, R rotated values of a head, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgufFile
from slm_core.types import Logits
from slm_native.kernels import FloatArray, KernelSet
from slm_native.kv import BatchPlan, KvLayer
from slm_native.rope import Rope
from slm_native.spec import ModelSpec
from slm_native.weights import Block, Linear, WeightReader


class Transformer:
    """Weights and the way through them. Nothing changes after creation, so threads may share it.

    Args:
        gguf: a file that ``check_tensors`` has accepted.
        spec: what it holds.
        kernels: the arithmetic.
        progress: called with the share of weights that are prepared.
    """

    def __init__(self, gguf: GgufFile, spec: ModelSpec, kernels: KernelSet, progress: Callable[[float], None]) -> None:
        reader = WeightReader(gguf, kernels)
        self.spec = spec
        self._kernels = kernels
        self._weights = reader.model()
        self._blocks: list[Block] = []
        for block in reader.blocks(spec.n_layers):
            self._blocks.append(block)
            progress(len(self._blocks) / spec.n_layers)
        self._rope = Rope(spec.rope, self._weights.rope_freqs)
        self._attention_scale = spec.head_dim**-0.5

    def forward(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        wants_logits: NDArray[np.bool_],
        plan: BatchPlan,
        layers: Sequence[KvLayer],
    ) -> Logits:
        """Run a batch; keys and values go where ``plan`` says.

        Args:
            tokens: ids [T].
            positions: of each token in its sequence [T].
            wants_logits: which tokens' logits are wanted [T].
            plan: where keys and values go, and which tokens see which.
            layers: the KV cache of each layer [L].

        Returns:
            float32 [rows wanted, V].
        """
        x = self._kernels.embed(self._weights.token_embd, tokens)  # [T, E]
        cos_sin = self._rope.tables(positions)  # [T, R/2] each
        for block, cache in zip(self._blocks, layers, strict=True):
            attended = self._attend(block, x, cos_sin, plan, cache)  # [T, E]
            if block is self._blocks[-1]:  # what follows is done token by token: only the rows asked for matter
                x, attended = x[wants_logits], attended[wants_logits]
                if len(x) == 0:
                    return np.empty((0, self.spec.n_vocab), np.float32)
            x = x + attended
            x = x + self._feed_forward(block, x)
        normed = self._kernels.rms_norm(x, self._weights.output_norm, self.spec.norm_eps)
        return self._linear(normed, self._weights.output)

    def rotate_keys(self, keys: FloatArray, delta: int) -> FloatArray:
        """Move rotated keys [T, heads, D] by ``delta`` positions, as if they had been rotated there."""
        cos, sin = self._rope.step_tables(delta, len(keys))
        return self._kernels.rope(keys, cos, sin, self._rope.style)

    def _attend(
        self, block: Block, x: FloatArray, cos_sin: tuple[FloatArray, FloatArray], plan: BatchPlan, cache: KvLayer
    ) -> FloatArray:
        kernels, eps = self._kernels, self.spec.norm_eps
        normed = kernels.rms_norm(x, block.attn_norm, eps)  # [T, E]
        q = self._heads(self._linear(normed, block.attn_q))  # [T, H, D]
        k = self._heads(self._linear(normed, block.attn_k))  # [T, K, D]
        v = self._heads(self._linear(normed, block.attn_v))  # [T, K, D]
        if block.attn_q_norm is not None and block.attn_k_norm is not None:
            q, k = kernels.rms_norm(q, block.attn_q_norm, eps), kernels.rms_norm(k, block.attn_k_norm, eps)
        q, k = (kernels.rope(heads, *cos_sin, self._rope.style) for heads in (q, k))
        cache.write(plan.pages, plan.slots, k, v)
        mixed = np.empty_like(q)  # [T, H, D]
        for run in plan.runs:
            mixed[run.rows] = kernels.attention_over_pages(
                q[run.rows], cache, run.pages, run.n_held, self._attention_scale
            )
        return self._linear(mixed.reshape(len(x), -1), block.attn_output)

    def _feed_forward(self, block: Block, x: FloatArray) -> FloatArray:
        normed = self._kernels.rms_norm(x, block.ffn_norm, self.spec.norm_eps)
        gate, up = self._linear(normed, block.ffn_gate), self._linear(normed, block.ffn_up)  # [T, F]
        return self._linear(self._kernels.silu_mul(gate, up), block.ffn_down)

    def _linear(self, x: FloatArray, linear: Linear) -> FloatArray:
        if linear.scale is None:
            return self._kernels.matmul(x, linear.weight, linear.bias)
        y = self._kernels.matmul(x, linear.weight) * linear.scale
        return y if linear.bias is None else y + linear.bias

    def _heads(self, x: FloatArray) -> FloatArray:
        return x.reshape(len(x), -1, self.spec.head_dim)
