"""The forward pass of a decoder-only model, the same for every architecture and every kernel set.

Shapes: T tokens of the batch, E embedding width, H query heads, K key and value heads, D head width, F feed-forward
width, V vocabulary, L layers, X experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import AnyActivation, LayerSpec, ModelSpec
from slm_core.errors import InvalidOption
from slm_core.gguf import WeightSource
from slm_core.types import KvType, Logits, States
from slm_native.encoding import attended_both_ways
from slm_native.experts import route, run_routed
from slm_native.kernels import FixedShape, FusedBlocks, KernelSet, Linear, Norm, PlainBlock
from slm_native.kv import Array, BatchPlan, KvLayer, PageLayout, in_chunks
from slm_native.latent import latent_queries_and_keys, latent_results
from slm_native.memory import ContextMemory, MemoryPlan
from slm_native.paging import LayerPager, Paging, PagingStats, ResidentBlocks
from slm_native.positions import LayerPositions, Positions
from slm_native.recurrent import mixed_by_state
from slm_native.rwkv import ChannelMix, channel_mixed
from slm_native.states import StateGroup
from slm_native.streams import corrected, layer_embeddings, learned_residual, let_in, merged, predicted, spread
from slm_native.weights import Attention, Block, Experts, FeedForward, LatentAttention, WeightReader


class _Turn(NamedTuple):
    """What a block gets of a batch besides activations."""

    place: LayerPositions
    pages: BatchPlan
    cache: KvLayer | None
    groups: Sequence[StateGroup]
    state: int | None  # which of the recurrent layers it has


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """What the device is told of a batch.

    Attributes:
        tokens: ids [T], in NumPy or where the kernels compute.
        positions: of each token [T], likewise.
        plans: where keys and values go, placed, for each kind of chunks that layers attend in.
        states: of the recurrent layers, where they are and go.
        places: what each layer does with the positions [L].
        wanted: which tokens' rows are wanted [T], None for all.
    """

    tokens: Array
    positions: Array
    plans: Mapping[int | None, BatchPlan]
    states: Sequence[StateGroup]
    places: Sequence[LayerPositions]
    wanted: NDArray[np.bool_] | None


class Transformer:
    """Weights and the way through them. Nothing changes after creation, so threads may share it.

    Args:
        gguf: a file that ``check_tensors`` has accepted.
        spec: what it holds.
        kernels: the arithmetic.
        progress: called with the share of weights that are prepared.
        paging: how much memory the blocks may take; None for as much as they need.

    Raises:
        InvalidOption: ``paging`` leaves too little, or steps are to be captured that cannot be.
    """

    def __init__(
        self,
        gguf: WeightSource,
        spec: ModelSpec,
        kernels: KernelSet,
        progress: Callable[[float], None],
        paging: Paging | None = None,
    ) -> None:
        self._reader = WeightReader(gguf, spec, kernels)
        self.spec = spec
        self._kernels = kernels
        self._check_kernels(paging)
        sizes = self._reader.sizes()
        absent = 0 if paging is None else max(0, sum(sizes.blocks) - paging.budget)
        kernels.reserve(sizes._replace(absent=absent))
        self._weights = self._reader.model()
        self._attention_scale = (spec.head_dim or 1) ** -0.5 if spec.attention_scale is None else spec.attention_scale
        self._fused: FusedBlocks | None = None
        self._blocks = self._resident(progress) if paging is None else self._paged(gguf, sizes.blocks, paging, progress)
        self.positions(1)  # refuses bad factors now

    def _check_kernels(self, paging: Paging | None) -> None:
        whys = {
            "layers are streamed": paging is not None,
            "experts are chosen on the host": any(layer.experts is not None for layer in self.spec.layers),
            "the model is an encoder": not self.spec.causal,
            "layers have states, or attend in chunks": not self._has_one_plan,
        }
        if self._kernels.captures and (why := next((why for why, holds in whys.items() if holds), None)):
            raise InvalidOption(f"decode.capture cannot be had where {why} (accepted: false)")
        whys = {
            "layers are streamed": paging is not None,
            "the model is an encoder": not self.spec.causal,
            "layers have states": any(layer.recurrent is not None for layer in self.spec.layers),
            "layers read keys of other layers": any(layer.kv_layer is not None for layer in self.spec.layers),
            "layers have embeddings of their own": self.spec.layer_embedding_width is not None,
        }
        if self._kernels.splits and (why := next((why for why, holds in whys.items() if holds), None)):
            raise InvalidOption(f"device_map cannot be had where {why} (accepted: one device)")

    def close(self) -> None:
        """Let go of the blocks; no pass may run."""
        self._blocks.close()
        self._fused = None

    @property
    def paging(self) -> PagingStats | None:
        """What streaming blocks has cost; None where all are there."""
        return self._blocks.stats

    def positions(self, n_ctx: int) -> Positions:
        """The position embeddings for a context of ``n_ctx`` positions.

        Raises:
            InvalidModelFile: the file's factors are no positive numbers.
        """
        return Positions(self.spec, n_ctx, self._reader.rope_factors, self._kernels)

    def forward(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        wants_rows: NDArray[np.bool_],
        plan: MemoryPlan,
        layers: Sequence[KvLayer],
        embedded: Positions,
        *,
        hidden: bool = False,
    ) -> Logits | States:
        """Run a batch; keys, values and states go where ``plan`` says.

        Args:
            tokens: ids [T].
            positions: of each token in its sequence [T].
            wants_rows: which tokens' rows are wanted [T].
            plan: where keys, values and states go, and which tokens see which.
            layers: the KV cache of each layer that attends.
            embedded: the context's position embeddings.
            hidden: whether rows are hidden states, in place of logits.

        Returns:
            float32 [rows wanted, V], or [rows wanted, E].
        """
        kernels = self._kernels
        fits = self._has_one_plan and not hidden and wants_rows.all()
        if fits and (shape := kernels.fixed(plan.pages, layers)) is not None:
            return kernels.to_host(self._step(shape, tokens, positions, layers, embedded))[: len(tokens)]
        plans, places = self._plans(plan.pages), embedded.at(positions)
        inputs = _Inputs(tokens, positions, plans, plan.states, places, wants_rows)
        rows = self._run(inputs, layers, hidden=hidden)
        width = self.spec.n_embd if hidden else self.spec.n_vocab
        return kernels.to_host(rows) if len(rows) else np.empty((0, width), np.float32)

    def warm(self, layers: Sequence[KvLayer], embedded: Positions) -> None:
        """Run a new context's steps of fixed shapes once, where they are to be warm."""
        for shape in self._kernels.warm_shapes(layers) if self._has_one_plan else ():
            nothing = np.zeros(0, np.int32)
            self._step(shape, nothing, nothing, layers, embedded)

    def _step(
        self,
        shape: FixedShape,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        layers: Sequence[KvLayer],
        embedded: Positions,
    ) -> Array:
        """The logits of a batch that is filled up to a shape, [n_tokens, V]; valid until the next step."""
        n_added = shape.n_tokens - len(tokens)
        tokens, positions = (np.concatenate([ids, np.zeros(n_added, np.int32)]) for ids in (tokens, positions))
        put, places = self._kernels.from_host, embedded.at(positions)
        inputs = _Inputs(put(tokens), put(positions), {None: shape.plan}, [], places, None)
        return shape.run(lambda given: self._run(given, layers), inputs)

    def _run(self, inputs: _Inputs, layers: Sequence[KvLayer], *, hidden: bool = False) -> Array:
        """The rows that are wanted: logits [rows, V], or hidden states [rows, E]; of none, [0, E]."""
        x = self._embed(inputs.tokens, inputs.positions)  # [T, E]
        turns = self._turns(inputs, layers)
        wanted = [None] * (self.spec.n_layers - 1) + [inputs.wanted]
        first = 0
        if self._fused is not None:
            x = self._fused.run(x, [turn.place.rotation for turn in turns], turns[0].pages, layers)
            first = self._fused.n_blocks
        streams, own = spread(self._kernels, self._weights.streams, x), self._layer_embeddings(inputs.tokens, x)
        with self._blocks.walk() as block_at:
            for i in range(first, self.spec.n_layers):
                streams = [self._kernels.entering(x, i) for x in streams]
                streams = self._around(block_at(i), self.spec.layers[i], streams, turns[i], own[i], wanted[i])
        x = self._kernels.entering(merged(self._kernels, self._weights.streams, streams), self.spec.n_layers)
        if len(x) == 0:
            return x
        return self._hidden(x) if hidden else self._logits(x)

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """What ``forward`` raises where the device fails it."""
        return self._kernels.failures

    @property
    def kv_type(self) -> KvType:
        """What keys and values are stored in where no type is asked for."""
        return self._kernels.kv_type

    def new_memory(self, layout: PageLayout, n_ctx: int, n_seq_max: int) -> ContextMemory:
        """Room for keys, values and states where the kernels compute; see ``ContextMemory``."""
        return ContextMemory(self.spec, layout, n_ctx, n_seq_max, self._kernels)

    def _plans(self, plan: BatchPlan) -> dict[int | None, BatchPlan]:
        """Where a batch's tokens go, for each kind of chunks that layers attend in."""
        placed: dict[int | None, BatchPlan] = {None: self._kernels.place(plan)}
        for chunk in {layer.chunk for layer in self.spec.layers if layer.chunk is not None}:
            chunked = in_chunks(plan, chunk)
            placed[chunk] = placed[None] if chunked is plan else self._kernels.place(chunked)
        return placed

    def _resident(self, progress: Callable[[float], None]) -> ResidentBlocks:
        blocks: list[Block] = []
        for i in range(self.spec.n_layers):
            blocks.append(self._reader.block(i))
            progress(len(blocks) / self.spec.n_layers)
        self._kernels.ready()
        self._fused = self._fuse(blocks[:-1])  # of the last, only some rows may be wanted
        return ResidentBlocks(blocks)

    def _fuse(self, blocks: Sequence[Block]) -> FusedBlocks | None:
        """The first blocks of the model as one call, where they are all plain and the kernels have it for them."""
        plain = [self._plain(*both) for both in zip(blocks, self.spec.layers, strict=False)]
        fit = [block for block in plain if block is not None]
        return self._kernels.fuse(fit) if fit and len(fit) == len(plain) else None

    def _plain(self, block: Block, layer: LayerSpec) -> PlainBlock | None:
        """A block that does nothing beyond what ``PlainBlock`` says, else None."""
        spec, attention, feed_forward = self.spec, block.attention, block.feed_forward
        if not isinstance(attention, Attention) or not isinstance(feed_forward, FeedForward) or layer.recurrent:
            return None
        if block.attn_post_norm is not None or block.ffn_post_norm is not None or layer.temperature is not None:
            return None
        if layer.chunk is not None or attention.v_norm is not None or attention.k is None or attention.v is None:
            return None
        if layer.gate_threshold is not None or block.laurel is not None or block.embedding is not None:
            return None
        if spec.parallel or spec.residual_scale != 1 or spec.qkv_limit is not None or not spec.causal:
            return None
        return PlainBlock(
            block.attn_norm,
            *(attention.q, attention.k, attention.v, attention.q_norm, attention.k_norm),
            *(spec.head_dim, self._attention_scale, block.scoring, attention.output, block.ffn_norm),
            *(feed_forward.gate, feed_forward.up, layer.activation, feed_forward.down),
        )

    def _paged(
        self, gguf: WeightSource, sizes: Sequence[int], paging: Paging, progress: Callable[[float], None]
    ) -> LayerPager:
        reader = WeightReader(gguf, self.spec, self._kernels, in_memory=self._kernels.reads_file)
        reader.check_blocks()
        pager = LayerPager(reader.block, sizes, paging, self._kernels.settle, progress)
        self._kernels.settle()
        progress(1.0)
        return pager

    def _turns(self, inputs: _Inputs, layers: Sequence[KvLayer]) -> list[_Turn]:
        caches: dict[int | None, KvLayer] = dict(zip(self.spec.attention_layers, layers, strict=True))
        recurrent = itertools.count()
        places = self._kernels.spread(inputs.places)
        plans = self._kernels.spread([inputs.plans[layer.chunk] for layer in self.spec.layers])
        return [
            _Turn(
                places[i],
                plans[i],
                caches.get(i if layer.kv_layer is None else layer.kv_layer),
                inputs.states,
                None if layer.recurrent is None else next(recurrent),
            )
            for i, layer in enumerate(self.spec.layers)
        ]

    @property
    def _has_one_plan(self) -> bool:
        """Whether a batch is to all layers the same: tokens and the pages that they see."""
        return self.spec.causal and all(layer.recurrent is None and layer.chunk is None for layer in self.spec.layers)

    def _layer_embeddings(self, tokens: Array, x: Array) -> Sequence[Array | None]:
        """Each block's own embedding of a batch [L], None where it has none."""
        weights, width = self._weights.layer_embeddings, self.spec.layer_embedding_width
        if weights is None or width is None:
            return [None] * self.spec.n_layers
        return layer_embeddings(self._kernels, weights, tokens, x, width)

    def _around(
        self,
        block: Block,
        layer: LayerSpec,
        streams: list[Array],
        turn: _Turn,
        own: Array | None,
        wanted: NDArray[np.bool_] | None,
    ) -> list[Array]:
        """What leaves a block in each stream; one stream without rows, where none are wanted."""
        kernels, active = self._kernels, self.spec.active_stream or 0
        guessed = streams if block.altup is None else predicted(kernels, block.altup, streams, active)
        x = self._through(block, layer, guessed[active], turn, wanted)
        if block.embedding is None or own is None or len(x) == 0:
            return [x]
        if wanted is not None:
            own, guessed = kernels.rows(own, wanted), [kernels.rows(stream, wanted) for stream in guessed]
        if block.altup is None:
            return [x + let_in(kernels, block.embedding, x, own, layer.activation)]
        return corrected(kernels, block.altup, block.embedding, guessed, x, own, active, layer.activation)

    def _through(
        self, block: Block, layer: LayerSpec, x: Array, turn: _Turn, wanted: NDArray[np.bool_] | None
    ) -> Array:
        """What leaves a block [T, E]; after the last, of the rows that are wanted [rows, E]."""
        branches = self._mixed(block, layer, x, turn)
        if isinstance(block.feed_forward, ChannelMix):
            x = self._channel_mixed(block, block.feed_forward, self._all_added(block, x, branches), turn)
            return x if wanted is None else self._kernels.rows(x, wanted)
        if wanted is not None:  # what follows is done token by token: only the rows asked for matter
            x = self._kernels.rows(x, wanted)
            branches = [(self._kernels.rows(mixed, wanted), output) for mixed, output in branches]
            if len(x) == 0:
                return x
        after = self._kernels.normed(self._all_added(block, x, branches), block.attn_sum_norm)
        made = self._fed(block, layer, x if self.spec.parallel else after, after)
        return self._kernels.normed(made, block.ffn_sum_norm)

    def _all_added(self, block: Block, x: Array, branches: Sequence[tuple[Array, Linear]]) -> Array:
        after = x
        for mixed, output in branches:
            after = self._added(after, mixed, output, block.attn_post_norm)
        if block.laurel is None:
            return after
        residual = learned_residual(self._kernels, block.laurel, self._kernels.normed(x, block.attn_norm))
        return (after + residual) * 2**-0.5

    def _channel_mixed(self, block: Block, weights: ChannelMix, x: Array, turn: _Turn) -> Array:
        assert turn.state is not None, "the weights were read by it"
        return x + channel_mixed(
            self._kernels, weights, self._kernels.normed(x, block.ffn_norm), turn.groups, turn.state
        )

    def _mixed(self, block: Block, layer: LayerSpec, x: Array, turn: _Turn) -> list[tuple[Array, Linear]]:
        """What each layer makes that mixes tokens, [T, width], and its output matrix."""
        found = []
        if block.attention is not None:
            found.append((self._attend(block, block.attention, layer, x, turn), block.attention.output))
        if block.recurrent is not None:
            assert turn.state is not None, "the weights were read by it"
            mixed = mixed_by_state(self._kernels, block.recurrent, x, block.attn_norm, turn.groups, turn.state)
            found.append((mixed, block.recurrent.output))
        return found

    def _embed(self, tokens: Array, positions: Array) -> Array:
        weights = self._weights
        x = self._kernels.embed(weights.token_embd, tokens)
        if self.spec.embedding_scale != 1:
            x = x * self.spec.embedding_scale
        if weights.token_type is not None:
            x = x + weights.token_type
        if weights.position_embd is not None:
            x = x + self._kernels.embed(weights.position_embd, positions)
        return self._kernels.normed(x, weights.embd_norm)

    def _attend(
        self, block: Block, weights: Attention | LatentAttention, layer: LayerSpec, x: Array, turn: _Turn
    ) -> Array:
        if turn.cache is None:
            return self._attend_both_ways(block, weights, x, turn)
        q = self._queries(block, weights, layer, x, turn.place, turn.pages, turn.cache)
        if turn.place.temperature is not None:
            q = q * turn.place.temperature
        mixed = self._kernels.attention_over_runs(q, turn.cache, turn.pages, self._attention_scale, block.scoring)
        if isinstance(weights, LatentAttention):
            assert layer.latent is not None, "the weights were read by it"
            mixed = latent_results(self._kernels, weights, layer.latent, mixed)
        return mixed.reshape(len(x), -1)

    def _attend_both_ways(self, block: Block, weights: Attention | LatentAttention, x: Array, turn: _Turn) -> Array:
        assert isinstance(weights, Attention), "no encoder attends to a latent"
        rotation, width, scale = turn.place.rotation, self.spec.head_dim, self._attention_scale
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
        kernels, width = self._kernels, self.spec.head_dim
        if isinstance(weights, LatentAttention):
            assert layer.latent is not None, "the weights were read by it"
            q, both = latent_queries_and_keys(kernels, weights, layer.latent, x, block.attn_norm)
            keys = kernels.heads(both, width, None, place.rotation)
            cache.write(plan.pages, plan.slots, keys, keys)  # one place: what is turned of them is in no result
            return kernels.heads(q, width, None, place.rotation)
        if weights.k is None or weights.v is None:
            (q,) = kernels.project(x, block.attn_norm, (weights.q,))
            return kernels.heads(q, width, weights.q_norm, place.rotation)
        q, k, v = kernels.project(x, block.attn_norm, (weights.q, weights.k, weights.v))
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
        if isinstance(weights, FeedForward) and layer.gate_threshold is not None:
            inner = self._sparsely_gated(weights, layer, layer.gate_threshold, self._kernels.normed(x, block.ffn_norm))
            return self._added(residual, inner, weights.down, post_norm)
        if isinstance(weights, FeedForward):
            inner = self._kernels.gate_up(x, block.ffn_norm, weights.gate, weights.up, layer.activation)
            return self._added(residual, inner, weights.down, post_norm)
        return self._scaled_sum(
            residual, self._routed(weights, layer, self._kernels.normed(x, block.ffn_norm)), post_norm
        )

    def _sparsely_gated(self, weights: FeedForward, layer: LayerSpec, threshold: float, x: Array) -> Array:
        assert weights.gate is not None, "the architecture has one"
        kernels = self._kernels
        gate = kernels.above_threshold(kernels.linear(x, weights.gate), threshold)
        return kernels.gated(gate, kernels.linear(x, weights.up), layer.activation)

    def _routed(self, weights: Experts, layer: LayerSpec, x: Array) -> Array:
        assert layer.experts is not None, "the weights were read by it"
        kernels, bias = self._kernels, weights.selection_bias
        scores = kernels.to_host(kernels.linear(x, weights.router))  # [T, X]
        routes = route(scores, layer.experts, None if bias is None else kernels.to_host(bias))
        mixed = run_routed(
            x,
            routes,
            lambda i, rows: self._dense(weights.experts[i], layer.activation, rows),
            kernels,
            scales_input=layer.experts.scales_input,
        )
        if weights.shared is None:
            return mixed
        shared = self._dense(weights.shared, layer.activation, x)
        if weights.shared_gate is not None:
            shared = shared * kernels.sigmoid(kernels.linear(x, weights.shared_gate))  # [T, 1]
        return mixed + shared

    def _dense(self, weights: FeedForward, activation: AnyActivation, x: Array) -> Array:
        inner = self._kernels.gate_up(x, None, weights.gate, weights.up, activation)  # [T, F]
        return self._kernels.linear(inner, weights.down)

    def _hidden(self, x: Array) -> Array:
        x = self._kernels.normed(x, self._weights.output_norm)
        for dense in self._weights.dense:
            x = self._kernels.linear(x, dense)
        return x

    def _logits(self, x: Array) -> Array:
        (logits,) = self._kernels.project(x, self._weights.output_norm, [self._weights.output])  # [rows, V]
        if self.spec.logit_scale != 1:
            logits = logits * self.spec.logit_scale
        return logits if self.spec.logit_softcap is None else self._kernels.softcap(logits, self.spec.logit_softcap)
