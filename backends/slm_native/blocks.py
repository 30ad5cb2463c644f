"""One block of a transformer, of any kind that a ``ModelSpec`` declares, step by step on any kernel set.

Shapes: T tokens of the batch, E embedding width, H query heads, K key and value heads, D head width, F feed-forward
width, X experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from numpy import bool_
from numpy.typing import NDArray

from slm_core.architectures import LayerSpec, ModelSpec
from slm_native.encoding import attended_both_ways
from slm_native.kernels import (
    ChannelMix,
    FeedForward,
    FusedBlocks,
    KernelSet,
    LatentAttention,
    Linear,
    Mixture,
    Norm,
    PlainBlock,
    Rwkv7,
    RwkvBlock,
    StateWeights,
)
from slm_native.kv import Array, BatchPlan, KvLayer
from slm_native.latent import latent_queries_and_keys, latent_results
from slm_native.positions import LayerPositions
from slm_native.recurrent import added_by_state, channel_mixed, channel_mixed_where, mixed_by_state, seen_of
from slm_native.states import StateGroup
from slm_native.streams import corrected, learned_residual, let_in, predicted
from slm_native.weights import Attention, Beside, Block


class Turn(NamedTuple):
    """What a block gets of a batch besides activations."""

    place: LayerPositions
    pages: BatchPlan
    cache: KvLayer | None
    groups: Sequence[StateGroup]
    state: int | None  # which of the recurrent layers it has


class Fused(NamedTuple):
    """One block or several that follow each other, as one call; of one, it may be its attention alone."""

    blocks: FusedBlocks
    is_whole: bool


class BlockRunner:
    """Runs blocks. Holds nothing that a run changes, so threads may share it.

    Args:
        spec: the model.
        kernels: the arithmetic.
    """

    def __init__(self, spec: ModelSpec, kernels: KernelSet) -> None:
        self.spec = spec
        self._kernels = kernels

    def plain(self, block: Block, layer: LayerSpec) -> PlainBlock | None:
        """As much of a block as ``PlainBlock`` has, from its beginning; None where that is not even its attention."""
        spec, attention, feed_forward = self.spec, block.attention, block.feed_forward
        if attention is None or not spec.causal:
            return None
        if layer.temperature is not None or block.attn_sum_norm is not None or block.ffn_sum_norm is not None:
            return None
        begun = PlainBlock(
            attn_norm=block.attn_norm,
            head_dim=spec.width_of(layer),
            scale=spec.scale_of(layer),
            scoring=block.scoring,
            output=attention.output,
            attn_post_norm=block.attn_post_norm,
            residual_scale=spec.residual_scale,
            parallel=spec.parallel,
            laurel=block.laurel,
        )
        begun = self._with_heads(begun, attention)
        if layer.recurrent is not None:  # what it makes is added next
            return begun
        if isinstance(feed_forward, FeedForward):
            inner = replace(begun, gate=feed_forward.gate, up=feed_forward.up, down=feed_forward.down)
        elif isinstance(feed_forward, Mixture):
            inner = replace(begun, mixture=feed_forward)
        else:
            return begun
        return replace(
            inner,
            ffn_norm=block.ffn_norm,
            gate_threshold=layer.gate_threshold,
            ffn_post_norm=block.ffn_post_norm,
            activation=layer.activation,
            altup=block.altup,
            active_stream=spec.active_stream or 0,
            embedding=block.embedding,
            output_scale=block.output_scale,
        )

    def rwkv(self, block: Block) -> RwkvBlock | None:
        """A block as ``RwkvBlock`` has it; None where it is another's, or has more."""
        time, channel = block.recurrent, block.feed_forward
        if not isinstance(time, Rwkv7) or not isinstance(channel, ChannelMix):
            return None
        if block.attention is not None or block.attn_post_norm is not None or self.spec.residual_scale != 1:
            return None
        assert block.attn_norm is not None and block.ffn_norm is not None, "both mixings are behind a norm"
        return RwkvBlock(block.attn_norm, time, block.ffn_norm, channel)

    def _with_heads(self, begun: PlainBlock, attention: Attention | LatentAttention) -> PlainBlock:
        """The block with what makes queries, keys and values."""
        if isinstance(attention, LatentAttention):
            return replace(begun, latent=attention)
        return replace(
            begun,
            q=attention.q,
            k=attention.k,
            v=attention.v,
            qkv_limit=self.spec.qkv_limit,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            v_norm=attention.v_norm,
        )

    def run(
        self,
        block: Block,
        layer: LayerSpec,
        streams: list[Array],
        turn: Turn,
        own: Array | None,
        wanted: NDArray[bool_] | None,
        fused: Fused | None = None,
    ) -> list[Array]:
        """What leaves a block in each stream; one stream without rows, where none are wanted.

        Args:
            block: its weights.
            layer: what it declares.
            streams: what enters it [T, E].
            turn: the batch.
            own: its own embedding of the tokens.
            wanted: which tokens' rows are wanted [T], None for all.
            fused: as much of it as is one call.
        """
        if fused is not None and fused.is_whole:
            assert turn.cache is not None, "what is fused attends to a cache"
            place, pages, cache = [turn.place.rotation], turn.pages, [turn.cache]
            return fused.blocks.run(streams, place, pages, cache, [own], wanted)
        kernels, active = self._kernels, self.spec.active_stream or 0
        guessed = streams if block.altup is None else predicted(kernels, block.altup, streams, active)
        x = self._through(block, layer, guessed[active], turn, wanted, fused)
        if len(x) == 0:
            return [x]
        if block.altup is None:
            own = own if own is None or wanted is None else kernels.rows(own, wanted)
            return [self._finished(block, layer, x, own)]
        assert block.embedding is not None and own is not None, "AltUp has embeddings for each layer"
        if wanted is not None:
            own, guessed = kernels.rows(own, wanted), [kernels.rows(stream, wanted) for stream in guessed]
        return corrected(kernels, block.altup, block.embedding, guessed, x, own, active, layer.activation)

    def _finished(self, block: Block, layer: LayerSpec, x: Array, own: Array | None) -> Array:
        """``x`` with the block's own embedding of its tokens, scaled."""
        if block.embedding is not None and own is not None:
            x = x + let_in(self._kernels, block.embedding, x, own, layer.activation)
        return x if block.output_scale is None else x * block.output_scale

    def _through(
        self,
        block: Block,
        layer: LayerSpec,
        x: Array,
        turn: Turn,
        wanted: NDArray[bool_] | None,
        fused: Fused | None,
    ) -> Array:
        """What leaves a block [T, E]; after the last, of the rows that are wanted [rows, E]."""
        if wanted is None and isinstance(block.recurrent, StateWeights) and self._adds_plainly(block, turn):
            return self._through_state(block, block.recurrent, layer, x, turn, fused)
        if fused is not None and block.recurrent is None:
            after = self._attended(x, turn, fused, wanted)
            if len(after) == 0:
                return after
            x = x if wanted is None else self._kernels.rows(x, wanted)
            return self._fed(block, layer, x if self.spec.parallel else after, after)
        branches = self._mixed(block, layer, x, turn)
        if isinstance(block.feed_forward, ChannelMix):
            return self._channel_mixed(block, block.feed_forward, x, branches, turn, wanted)
        if wanted is not None:  # what follows is done token by token: only the rows asked for matter
            x = self._kernels.rows(x, wanted)
            branches = [(self._kernels.rows(mixed, wanted), output) for mixed, output in branches]
            if len(x) == 0:
                return x
        after = self._with_laurel(block, x, self._all_added(block, x, branches))
        after = self._kernels.normed(after, block.attn_sum_norm)
        made = self._fed(block, layer, x if self.spec.parallel else after, after)
        return self._kernels.normed(made, block.ffn_sum_norm)

    def _adds_plainly(self, block: Block, turn: Turn) -> bool:
        """Whether a batch's sequences are one group, and nothing is done to what layers make but that it is added."""
        norms = block.attn_post_norm, block.attn_sum_norm
        return len(turn.groups) == 1 and norms == (None, None) and block.laurel is None

    def _attended(self, x: Array, turn: Turn, fused: Fused, wanted: NDArray[bool_] | None) -> Array:
        """What leaves an attention that is one call."""
        assert turn.cache is not None, "what is fused attends to a cache"
        (after,) = fused.blocks.run([x], [turn.place.rotation], turn.pages, [turn.cache], [None], wanted)
        return after

    def _through_state(
        self, block: Block, weights: StateWeights, layer: LayerSpec, x: Array, turn: Turn, fused: Fused | None
    ) -> Array:
        """What leaves a block with a state, of a batch whose sequences are one group; its attention may be one call."""
        assert turn.state is not None, "the weights were read by it"
        after = x
        if fused is not None:
            after = self._attended(x, turn, fused, None)
        elif block.attention is not None:
            mixed = self._attend(block, block.attention, layer, x, turn)
            after = self._added(x, mixed, block.attention.output, None)
        given = x, block.attn_norm, after, self.spec.residual_scale
        after = added_by_state(self._kernels, weights, *given, turn.groups[0], turn.state)
        made = self._fed(block, layer, x if self.spec.parallel else after, after)
        return self._kernels.normed(made, block.ffn_sum_norm)

    def _all_added(self, block: Block, x: Array, branches: Sequence[tuple[Array, Linear]]) -> Array:
        after = x
        for mixed, output in branches:
            after = self._added(after, mixed, output, block.attn_post_norm)
        return after

    def _with_laurel(self, block: Block, x: Array, after: Array) -> Array:
        """What follows attention, ``x`` having entered the block."""
        if block.laurel is None:
            return after
        residual = learned_residual(self._kernels, block.laurel, self._kernels.normed(x, block.attn_norm))
        return (after + residual) * 2**-0.5

    def _channel_mixed(
        self,
        block: Block,
        weights: ChannelMix,
        x: Array,
        branches: Sequence[tuple[Array, Linear]],
        turn: Turn,
        wanted: NDArray[bool_] | None,
    ) -> Array:
        assert turn.state is not None, "the weights were read by it"
        kernels, beside = self._kernels, (turn.groups, turn.state)
        if wanted is None:
            x = self._all_added(block, x, branches)
            return x + channel_mixed(kernels, weights, kernels.normed(x, block.ffn_norm), *beside)
        seen = seen_of(turn.groups, wanted)
        some = [(kernels.rows(mixed, seen.rows), output) for mixed, output in branches]
        x = self._all_added(block, kernels.rows(x, seen.rows), some)
        made = channel_mixed_where(kernels, weights, kernels.normed(x, block.ffn_norm), *beside, seen)
        return kernels.rows(x, seen.wanted) + made

    def _mixed(self, block: Block, layer: LayerSpec, x: Array, turn: Turn) -> list[tuple[Array, Linear]]:
        """What each layer makes that mixes tokens, [T, width], and its output matrix."""
        found = []
        if block.attention is not None:
            found.append((self._attend(block, block.attention, layer, x, turn), block.attention.output))
        if block.recurrent is not None:
            assert turn.state is not None, "the weights were read by it"
            mixed = mixed_by_state(self._kernels, block.recurrent, x, block.attn_norm, turn.groups, turn.state)
            found.append((mixed, block.recurrent.output))
        return found

    def _attend(
        self, block: Block, weights: Attention | LatentAttention, layer: LayerSpec, x: Array, turn: Turn
    ) -> Array:
        if turn.cache is None:
            return self._attend_both_ways(block, weights, layer, x, turn)
        q = self._queries(block, weights, layer, x, turn.place, turn.pages, turn.cache)
        if turn.place.temperature is not None:
            q = q * turn.place.temperature
        scale = self.spec.scale_of(layer)
        mixed = self._kernels.attention_over_runs(q, turn.cache, turn.pages, scale, block.scoring)
        if isinstance(weights, LatentAttention):
            assert layer.latent is not None, "the weights were read by it"
            mixed = latent_results(weights, layer.latent, mixed)
        return mixed.reshape(len(x), -1)

    def _attend_both_ways(
        self, block: Block, weights: Attention | LatentAttention, layer: LayerSpec, x: Array, turn: Turn
    ) -> Array:
        assert isinstance(weights, Attention), "no encoder attends to a latent"
        rotation, width, scale = turn.place.rotation, self.spec.width_of(layer), self.spec.scale_of(layer)
        runs, norm = turn.pages.runs, block.attn_norm
        mixed = attended_both_ways(self._kernels, weights, x, norm, rotation, width, runs, scale, block.scoring)
        return mixed.reshape(len(x), -1)

    def _queries(
        self,
        block: Block,
        weights: Attention | LatentAttention,
        layer: LayerSpec,
        x: Array,
        place: LayerPositions,
        plan: BatchPlan,
        cache: KvLayer,
    ) -> Array:
        """The batch's queries [T, H, D]; its keys and values go into the cache."""
        kernels, width = self._kernels, self.spec.width_of(layer)
        if isinstance(weights, LatentAttention):
            assert layer.latent is not None, "the weights were read by it"
            q, both = latent_queries_and_keys(kernels, weights, layer.latent, x, block.attn_norm)
            keys = kernels.heads(both, width, None, place.rotation)
            cache.write(plan.pages, plan.slots, keys, keys)  # one place: what is turned of them is in no result
            return kernels.heads(q, width, None, place.rotation)
        if weights.k is None:
            (q,) = kernels.project(x, block.attn_norm, (weights.q,))
            return kernels.heads(q, width, weights.q_norm, place.rotation)
        linears = [weights.q, weights.k] if weights.v is None else [weights.q, weights.k, weights.v]
        q, k, *values = kernels.project(x, block.attn_norm, linears)
        v = values[0] if values else k
        if self.spec.qkv_limit is not None:
            q, k, v = (kernels.clip(flat, self.spec.qkv_limit) for flat in (q, k, v))
        if weights.v_norm is not None:
            v = kernels.heads(v, width, weights.v_norm).reshape(len(v), -1)
        kernels.store(cache, plan, k, v, width, weights.k_norm, place.rotation)
        return kernels.heads(q, width, weights.q_norm, place.rotation)

    def _added(self, residual: Array, x: Array, linear: Linear, post_norm: Norm | None) -> Array:
        """``residual`` and what a branch of the block makes of ``x`` at last."""
        if post_norm is None and self.spec.residual_scale == 1:
            return self._kernels.add_product(residual, x, linear)
        return self._scaled_sum(residual, self._kernels.linear(x, linear), post_norm)

    def _scaled_sum(self, residual: Array, made: Array, post_norm: Norm | None) -> Array:
        made, scale = self._kernels.normed(made, post_norm), self.spec.residual_scale
        return residual + (made if scale == 1 else made * scale)

    def _fed(self, block: Block, layer: LayerSpec, x: Array, residual: Array) -> Array:
        """What leaves the block: ``residual``, and what the feed-forward layer makes of ``x``."""
        weights, post_norm = block.feed_forward, block.ffn_post_norm
        if weights is None or isinstance(weights, ChannelMix):
            return residual
        if isinstance(weights, FeedForward):
            made_of = weights.gate, weights.up, layer.activation, layer.gate_threshold
            inner = self._kernels.gate_up(x, block.ffn_norm, *made_of)
            return self._added(residual, inner, weights.down, post_norm)
        if isinstance(weights, Beside):
            return self._scaled_sum(residual, self._both(weights, block, layer, x), post_norm)
        return self._scaled_sum(residual, weights.run(x, block.ffn_norm), post_norm)

    def _both(self, weights: Beside, block: Block, layer: LayerSpec, x: Array) -> Array:
        """What a dense layer and experts beside it make of ``x``, each normalized."""
        kernels = self._kernels
        dense = kernels.feed_forward(kernels.normed(x, block.ffn_norm), weights.dense, layer.activation)
        mixed = weights.experts.run(x, weights.experts_norm, kernels.normed(x, weights.router_norm))
        return kernels.normed(dense, weights.dense_norm) + kernels.normed(mixed, weights.mixed_norm)
