"""A context of the native engine: its keys, values and recurrent states, over ``ContextBase``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from slm_core.adapters import AdapterSet, LoadedAdapters
from slm_core.architectures import KvShape, ModelSpec
from slm_core.container import Pieces
from slm_core.context import ContextBase, check_context_options, check_position_limit, joined_top, no_top_logits
from slm_core.context.batch import TokenBatch
from slm_core.context.biases import AttentionBiases
from slm_core.context.finite import check_logits, check_states, check_top
from slm_core.context.inputs import add_held
from slm_core.context.mrope import MropePositions
from slm_core.context.payload import PayloadWriter
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import DecodeFailed, InvalidOption
from slm_core.protocols import Batch
from slm_core.types import Capability, ContextOptions, EditLevel, KvType, Logits, Pos, States, TopLogits
from slm_native.adapted import Adapted
from slm_native.host_batch import HostBatch
from slm_native.kv import Array, PageLayout, Rotate, codec_of, with_biases
from slm_native.memory import REPLAY_TOKENS, KvLayouts, MemoryPlan, Past
from slm_native.mtp import BatchStates, rows_of
from slm_native.transformer import Transformer

BACKEND = "native"
R = TypeVar("R")
_PAYLOAD_VERSION = 1
_BOTH = frozenset({Capability.EMBEDDINGS, Capability.EMBEDDING_INPUT})
_DECODER = _BOTH | {Capability.SHARED_FORK, Capability.KV_PAYLOAD}
_ENCODER = _BOTH | {Capability.ENCODER}


class NativeContext(ContextBase):
    """Several token histories in one paged KV cache.

    A fork shares pages until one side writes on them. A cut keeps values bit for bit. It rotates keys in float32, and
    then rounds them to their KV type once more. An encoder has neither keys nor values.

    Args:
        transformer: the model.
        options: the sizes, and the KV types (None for the default of the kernels).
        fingerprint: fingerprint of the model.
        adapters: the adapters of the model.

    Raises:
        InvalidOption: a size below 1, too little memory, or a KV type that is unknown or does not fit the heads.
    """

    def __init__(
        self,
        transformer: Transformer,
        options: ContextOptions,
        fingerprint: str,
        adapters: LoadedAdapters,
    ) -> None:
        check_context_options(options)
        spec = transformer.spec
        types = [
            transformer.kv_type if kv_type is None else kv_type for kv_type in (options.kv_type_k, options.kv_type_v)
        ]
        layouts = _layouts(spec, options.n_ctx, *types, keeps_windows=transformer.keeps_windows)
        _check_kv_types(types, transformer.kv_types)
        self._memory = transformer.new_memory(options, layouts)  # raises if the sizes exceed the memory
        self._transformer = transformer
        self._adapted: Adapted | None = None
        self._used: AdapterSet = ()
        self._positions = transformer.positions(options.n_ctx)
        self._states = transformer.new_states()
        transformer.warm(self._memory.layers, self._positions)
        super().__init__(
            options,
            backend=BACKEND,
            fingerprint=fingerprint,
            n_vocab=spec.n_vocab,
            edit_level=_edit_level(spec, layouts),
            capabilities=_capabilities(transformer, layouts),
            payload_format=_payload_format(layouts, self._positions.kind),
            n_embd=spec.n_embd,
            adapters=adapters,
            n_layers=spec.n_layers,
        )
        inputs_of = self._ledger.inputs  # not a method of this object: a reference cycle would keep it in memory
        self._mrope_positions = MropePositions(inputs_of) if spec.has_sections else None
        self._biases = AttentionBiases(inputs_of)

    def _check_dumped_inputs(self, snapshot: SequenceSnapshot) -> None:
        super()._check_dumped_inputs(snapshot)
        self._biases.look_for(snapshot.held())

    def _engine_use(self, adapters: AdapterSet) -> None:
        self._adapted = self._transformer.adapted(adapters)
        self._used = adapters

    def _engine_decode(self, batch: Batch) -> Logits:
        return self._run(batch, self._transformer.forward, check_logits)

    def _engine_decode_top(self, batch: Batch, k: int) -> TopLogits:
        def top(host_batch: HostBatch) -> TopLogits:
            rows = self._transformer.rows(host_batch)
            return self._transformer.top(rows, k) if len(rows) else no_top_logits(k)

        return self._run(batch, top, check_top)

    def _engine_embed(self, batch: Batch) -> States:
        return self._run(batch, partial(self._transformer.forward, hidden=True), check_states)

    def _engine_layer_states(self, batch: Batch, layers: Sequence[int]) -> States:
        adapted = self._transformer.adapted(self._used, sorted(set(layers)))

        def states(host_batch: HostBatch) -> States:
            return self._transformer.layer_states(replace(host_batch, adapted=adapted), layers)

        return self._run(batch, states, check_states)

    def _engine_draft(self, seq_id: int, token: int, n: int, k: int) -> TopLogits:
        length, rows = self._ledger.length(seq_id), []
        state = self._state_before(seq_id, length)
        batch = TokenBatch(1)
        with self._memory.drafting():
            for position in range(length, length + n):
                batch.clear()
                batch.add(token, Pos(seq_id, position), logits=True)
                plan = self._planned(batch)
                top, state = self._guarded(partial(self._predict, state=state, k=k), batch, plan)
                check_top(top)
                self._memory.commit(plan)
                rows.append(top)
                token = int(top.tokens[0, 0])
        return joined_top(rows)

    def _predict(self, batch: HostBatch, *, state: Array, k: int) -> tuple[TopLogits, Array]:
        logits, state = self._transformer.predict(batch, state)
        return self._transformer.top(logits, k), state

    def _run(self, batch: Batch, forward: Callable[[HostBatch], R], check: Callable[[R], None]) -> R:
        check_position_limit(batch, self._transformer.spec.n_positions)
        batch_states = self._states_around(batch)
        plan = self._planned(batch)
        rows = self._guarded(forward, batch, plan, batch_states)
        check(rows)
        if self._transformer.spec.causal:
            self._memory.commit(plan)
        if self._states is not None and batch_states is not None:
            self._states.keep(batch_states)
        return rows

    def _planned(self, batch: Batch) -> MemoryPlan:
        plan = self._memory.plan(batch.seq_ids, batch.positions, batch.ahead)
        return self._with_biases(plan, batch)

    def _with_biases(self, plan: MemoryPlan, batch: Batch) -> MemoryPlan:
        biases = self._biases.of(batch)
        return replace(plan, pages=with_biases(plan.pages, biases)) if biases else plan

    def _states_around(self, batch: Batch) -> BatchStates | None:
        """``BatchStates`` with the hidden states before a batch; None without an MTP layer."""
        if self._states is None:
            return None
        sequences = rows_of(batch)
        before = [self._state_before(rows.seq_id, rows.start) for rows in sequences]
        return BatchStates(sequences, self._transformer.joined(before))

    def _state_before(self, seq_id: int, length: int) -> Array:
        """The hidden state [1, E] of token ``length - 1`` of a sequence; the token runs again if its state is not kept.

        It is zero before the first token.
        """
        assert self._states is not None, "the context declares MTP"
        if length == 0:
            return self._states.zero
        state = self._states.at(seq_id, length - 1)
        if state is None:
            last = TokenBatch(1)
            add_held(last, self._ledger.inputs(seq_id)[length - 1 : length], Pos(seq_id, length - 1))
            plan = self._with_biases(self._memory.replay(seq_id, Past(length - 1, None, {}), length), last)
            state = self._guarded(self._all_states, last, plan)
            self._states.put(seq_id, length - 1, state)
        return state

    def _all_states(self, batch: HostBatch) -> Array:
        return self._transformer.rows(replace(batch, output_mask=np.ones(len(batch), np.bool_)), hidden=True)

    def _guarded(
        self, forward: Callable[[HostBatch], R], batch: Batch, plan: MemoryPlan, states: BatchStates | None = None
    ) -> R:
        rope_positions = batch.positions if self._mrope_positions is None else self._mrope_positions.of(batch)
        inputs = batch.tokens, batch.embeddings, batch.positions, rope_positions, batch.logits_mask
        memory = plan, self._memory.layers, self._positions
        try:
            return forward(HostBatch(*inputs, *memory, self._adapted, states))
        except self._transformer.failures as error:
            raise DecodeFailed(f"the device failed on a batch of {len(batch)} tokens: {error}") from error

    def _past(self, seq_id: int, length: int) -> Past:
        """The recurrent states and windows after ``length`` tokens, replayed from the nearest earlier ones in memory.

        Raises:
            DecodeFailed: the device failed; nothing has changed.
        """
        past, tokens = self._memory.nearest(seq_id, length), self._ledger.inputs(seq_id)
        while past.position < length:
            stop = min(length, past.position + REPLAY_TOKENS)
            plan = self._memory.replay(seq_id, past, stop)
            replayed = TokenBatch(stop - past.position)
            add_held(replayed, tokens[past.position : stop], Pos(seq_id, past.position))
            self._guarded(self._transformer.forward, replayed, plan)
            past = self._memory.replayed(plan, stop)
        return past

    def _engine_fork_cost(self, src: int, end: int) -> int:
        return end - self._memory.nearest(src, end).position

    def _engine_fork(self, src: int, dst: int, end: int) -> None:
        self._memory.fork(src, dst, self._past(src, end))
        self._edited(dst)
        if self._states is not None:
            self._states.fork(src, dst)

    def _engine_truncate(self, seq_id: int, length: int) -> None:
        self._memory.truncate(seq_id, self._past(seq_id, length))
        self._forget_positions(seq_id)

    def _engine_cut(self, seq_id: int, start: int, end: int) -> None:
        rotate = self._positions.move_keys
        if self._mrope_positions is not None:
            n_mrope_positions = self._mrope_positions.between(seq_id, start, end)
            rotate = partial(_move_by, rotate, -n_mrope_positions)
        self._memory.cut(seq_id, start, end, self._ledger.length(seq_id), rotate)
        self._edited(seq_id)

    def _engine_drop(self, seq_id: int) -> None:
        self._memory.drop(seq_id)
        self._edited(seq_id)

    def _edited(self, seq_id: int) -> None:
        """Forget everything that depends on the contents of a sequence."""
        self._forget_positions(seq_id)
        if self._states is not None:
            self._states.forget(seq_id)

    def _forget_positions(self, seq_id: int) -> None:
        self._biases.forget(seq_id)
        if self._mrope_positions is not None:
            self._mrope_positions.forget(seq_id)

    def _engine_export(self, seq_id: int) -> Pieces:
        return self._memory.export(seq_id, self._ledger.length(seq_id))

    def _engine_export_tail(self, seq_id: int, start: int) -> Pieces:
        return self._memory.export(seq_id, self._ledger.length(seq_id), start)

    def _engine_tail_writer(self, seq_id: int, src: int, start: int, end: int, n_bytes: int) -> PayloadWriter:
        writer = self._memory.writer(seq_id, end, n_bytes, lambda: self._edited(seq_id), (src, start))
        assert writer is not None, "each window has room for every sequence"
        return writer

    def _engine_check_payload(self, n_tokens: int, payload: bytes) -> None:
        self._memory.check(n_tokens, payload)

    def _engine_import(self, seq_id: int, n_tokens: int, payload: bytes) -> None:
        writer = self._engine_writer(seq_id, n_tokens, len(payload))
        assert writer is not None, "an empty sequence leaves room for what the ledger has room for"
        writer.write(memoryview(payload))
        writer.put()

    def _engine_writer(self, seq_id: int, n_tokens: int, n_bytes: int) -> PayloadWriter | None:
        return self._memory.writer(seq_id, n_tokens, n_bytes, lambda: self._edited(seq_id))

    def _engine_reserving_writer(self, seq_id: int, n_tokens: int, n_bytes: int) -> PayloadWriter | None:
        return self._memory.writer(seq_id, n_tokens, n_bytes, lambda: self._edited(seq_id), reserves=True)

    def _engine_close(self) -> None:
        # ContextBase rejects later calls. These are the last references: pages, states and weights are freed now.
        del self._memory, self._transformer, self._positions, self._mrope_positions, self._adapted, self._states


def _check_kv_types(kv_types: Sequence[KvType], accepted: Sequence[KvType]) -> None:
    """Refuse unknown KV types, even if the model keeps no keys."""
    for kv_type in kv_types:
        if kv_type not in accepted:
            raise InvalidOption(f"this tier has no KV type {kv_type} (accepted: {', '.join(accepted)})")


def _move_by(move: Rotate, n_mrope_positions: int, keys: Array, _: int, blocks: Sequence[int]) -> Array:
    """Rotate keys after a cut by its number of M-RoPE positions, which may differ from its number of tokens."""
    return move(keys, n_mrope_positions, blocks)


def _layouts(spec: ModelSpec, n_ctx: int, kv_type_k: str, kv_type_v: str, *, keeps_windows: bool) -> KvLayouts:
    """Page layouts for the groups of layers that have KV caches; one layout without layers if there are none.

    A window at least as long as the context counts as no window.
    """
    sizes = {layer.window for layer in spec.layers if layer.window is not None}
    narrow_windows = {window for window in sizes if keeps_windows and window < n_ctx}
    full: list[PageLayout] = []
    windows: dict[int, list[PageLayout]] = {}
    for (shape, window), blocks in spec.kv_groups(narrow_windows).items():
        layouts = full if window is None else windows.setdefault(window, [])
        layouts.append(_layout(shape, blocks, kv_type_k, kv_type_v))
    if not full and not windows:
        any_shape = KvShape(spec.n_kv_heads, spec.head_dim, values_in_keys=False)
        full.append(_layout(any_shape, [], kv_type_k, kv_type_v))
    return KvLayouts(full, windows)


def _layout(shape: KvShape, blocks: Sequence[int], kv_type_k: str, kv_type_v: str) -> PageLayout:
    keys, values = codec_of(kv_type_k, shape.head_dim), codec_of(kv_type_v, shape.head_dim)
    if shape.values_in_keys and keys.kv_type != values.kv_type:
        raise InvalidOption(
            f"kv_type_k={keys.kv_type}, kv_type_v={values.kv_type}: this model's values are its keys"
            " (accepted: equal types)"
        )
    return PageLayout(blocks, shape.n_kv_heads, shape.head_dim, keys, values, shape.values_in_keys)


def _payload_format(layouts: KvLayouts, rope_kind: str) -> str:
    """The key of the payload format: a context can import a payload only if both have the same key."""
    groups = [(layout, "") for layout in layouts.full]
    groups += [(layout, f";window={window}") for window, each in layouts.windows.items() for layout in each]
    first, _ = groups[0]
    facts = (
        f"L={layout.n_layers};K={layout.n_kv_heads};D={layout.head_dim}"
        + ";values in keys" * layout.values_in_keys
        + window
        for layout, window in groups
    )
    types = f"k={first.keys.kv_type};v={first.values.kv_type}"
    return ";".join([str(_PAYLOAD_VERSION), types, *facts, *([f"rope={rope_kind}"] if rope_kind else [])])


def _capabilities(transformer: Transformer, layouts: KvLayouts) -> frozenset[Capability]:
    adapters = {Capability.ADAPTERS} if transformer.takes_adapters else set()
    states = {Capability.LAYER_STATES} if transformer.keeps_layer_states else set()
    if not transformer.spec.causal:
        return _ENCODER | adapters | states
    blocks = {Capability.BIDIRECTIONAL_BLOCKS} if _takes_blocks(transformer.spec, layouts) else set()
    mrope = {Capability.MROPE_POSITIONS} if transformer.spec.has_sections else set()
    sampling = {Capability.DEVICE_SAMPLING} if transformer.picks_top else set()
    mtp = {Capability.MTP} if transformer.spec.n_mtp_layers else set()
    bias = {Capability.ATTENTION_BIAS} if _takes_bias(transformer, layouts) else set()
    return _DECODER | blocks | mrope | sampling | adapters | states | mtp | bias


def _takes_blocks(spec: ModelSpec, layouts: KvLayouts) -> bool:
    """Whether bidirectional blocks are possible: not with recurrent layers, chunks, ALiBi or windowed caches."""
    if layouts.windows or spec.alibi_max_bias is not None:
        return False
    return all(layer.recurrent is None and layer.chunk is None for layer in spec.layers)


def _takes_bias(transformer: Transformer, layouts: KvLayouts) -> bool:
    """Whether keys may have attention biases: not on every tier, nor with recurrent layers or windowed caches."""
    return transformer.takes_bias and not layouts.windows and not transformer.spec.recurrent_layers


def _edit_level(spec: ModelSpec, layouts: KvLayouts) -> EditLevel:
    if not spec.causal:
        return EditLevel.REPLAY  # there is nothing to edit
    return EditLevel.CUT if spec.is_shiftable and not layouts.windows else EditLevel.TRUNCATE
