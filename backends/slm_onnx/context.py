"""A context: cells of one KV cache, and the session that decodes into it."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.adapters import AdapterSet, LoadedAdapters, LowRank, stacked, summed_directions
from slm_core.architectures import EMBEDDING, ModelSpec, ReadFactors
from slm_core.container import Pieces
from slm_core.context import ContextBase, check_context_options, check_position_limit
from slm_core.context.biases import AttentionBiases
from slm_core.context.finite import Check, check_logits, check_states, with_last_rows
from slm_core.context.mrope import MropePositions
from slm_core.context.payload import PayloadWriter, Section, SectionWriter
from slm_core.context.snapshot import SequenceSnapshot
from slm_core.errors import DecodeFailed, InvalidOption, InvalidSnapshot
from slm_core.protocols import Batch
from slm_core.quant import QuantizedTensor, dequantize_rows
from slm_core.types import EMBEDDED, Capability, ContextOptions, EditLevel, KvType, Logits, States
from slm_onnx import BACKEND
from slm_onnx.cells import FARTHEST, CellTable, Move
from slm_onnx.celltransfer import DeviceTransfer, HostTransfer, Planes, Transfer, TransferSessions, unpacked
from slm_onnx.decoders import Decoders, DecoderSessions
from slm_onnx.devicelock import on_device
from slm_onnx.feeding import ExactFeed, Feed, FixedFeed, Sizes, SplitFeed, padded, spare_cells
from slm_onnx.kvstore import CellMover, KvStore
from slm_onnx.positions import Positions
from slm_onnx.providers import Device

_PAYLOAD_VERSION = 2
_UNSEEN, _BESIDE = -1, 0  # distances of cells: a token does not attend to the cell; the cell is in every window
_FIRST_ANGLE = struct.Struct("<i")  # before the keys and values of a payload


@dataclass(frozen=True, slots=True, eq=False)
class Sessions:
    """Sessions of the graphs for one KV type.

    Attributes:
        decoder: session of the decoder graph.
        has_bias: whether the decoder has an attention bias; without one, all cells in use must be of one sequence.
        bidirectional: makes the session for batches with bidirectional blocks on its first call; None if not supported.
        mover: session that moves cells.
        rotator: session that re-rotates keys in place; None if no layer uses RoPE.
        transfer: sessions for a cache in the device's own memory; None for a cache in host memory.
    """

    decoder: Any
    has_bias: bool
    bidirectional: Callable[[], Any] | None
    mover: Any
    rotator: Any | None
    transfer: TransferSessions | None


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """The state that all contexts of a model share.

    Attributes:
        spec: the model's architecture and sizes.
        read_factors: reads a table of RoPE factors.
        embedding: the token embedding, mapped from the file.
        position_embedding: the learned positions, mapped from the file.
        sessions: returns the sessions for a KV type, for one or several sequences; made on the first call.
        kv_types: the supported KV types, the default first.
        device: device of the sessions.
        fingerprint: fingerprint of the model.
        buckets: whether batches are padded to a few shapes.
        captures: whether the provider captures graphs.
        most_rows: most tokens of one run of the decoder; None for any number.
        numbers: unused numbers for captured shapes.
        has_states: whether graphs have hidden states as an output.
        adapted: returns the sessions of the graph with inputs for adapters, for a KV type, with or without a bias; made
            on the first call. None if there are no adapters on this device.
    """

    spec: ModelSpec
    read_factors: ReadFactors
    embedding: QuantizedTensor
    position_embedding: QuantizedTensor | None
    sessions: Callable[[KvType, bool], Sessions]
    kv_types: tuple[KvType, ...]
    device: Device
    fingerprint: str
    buckets: bool
    captures: bool = False
    most_rows: int | None = None
    numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    has_states: bool = False
    adapted: Callable[[KvType, bool], DecoderSessions] | None = None


class OnnxContext(ContextBase):
    """Several token histories in one row of cells.

    A fork shares cells. A cut only records the rotations of keys, and copies the cells that a fork shares. Keys are
    rotated in place when their sequence is next decoded or dumped.

    Args:
        engine: the shared state of the model.
        options: the sizes, and one KV type for keys and values.
        adapters: the adapters of the model.

    Raises:
        InvalidOption: a size below 1, too little memory, or an unsupported KV type.
        UnsupportedModel: ONNX Runtime refuses the graph for that KV type.
    """

    def __init__(self, engine: Engine, options: ContextOptions, adapters: LoadedAdapters | None = None) -> None:
        check_context_options(options)
        spec, self._dtype = engine.spec, engine.device.provider.dtype
        self._kv_type = _kv_type(engine, options)
        self._engine: Engine = engine
        self._device_lock = engine.device.provider.lock
        self._cells = CellTable(options.n_ctx, options.n_seq_max)
        spare = spare_cells(options.n_batch) if engine.buckets else 0
        self._sessions = sessions = engine.sessions(self._kv_type, options.n_seq_max == 1)
        clearer = sessions.transfer and sessions.transfer.clearer
        self._store = KvStore(spec, options.n_ctx + spare, self._kv_type, engine.device, clearer)
        self._transfer = _transfer(self._store, sessions)
        self._positions = Positions(spec, options.n_ctx, engine.read_factors)
        self._mover = CellMover(sessions.mover, sessions.rotator, self._store, self._positions)
        new_feed = partial(_new_feed, engine, self._store)  # not a method: a reference cycle would keep this object
        self._plain = Decoders(DecoderSessions(sessions.decoder, sessions.bidirectional), new_feed)
        self._adapted: Decoders | None = None  # made for the first adapters
        self._decoders = self._plain
        self._embedding_change: LowRank | None = None
        super().__init__(
            options,
            backend=BACKEND,
            fingerprint=engine.fingerprint,
            n_vocab=spec.n_vocab,
            edit_level=EditLevel.CUT if spec.is_shiftable else EditLevel.TRUNCATE,
            capabilities=_capabilities(engine, sessions),
            payload_format=f"{_PAYLOAD_VERSION};{self._kv_type};L={spec.n_layers};K={spec.n_kv_heads};D={spec.head_dim}"
            + (f";rope={self._positions.kind}" if self._positions.kind else ""),
            n_embd=spec.n_embd,
            adapters=adapters,
        )
        held = self._ledger.inputs  # not a method of this object: a reference cycle would keep it in memory
        self._mrope_positions = MropePositions(held) if spec.has_sections else None
        self._biases = AttentionBiases(held)

    def _check_dumped_inputs(self, snapshot: SequenceSnapshot) -> None:
        super()._check_dumped_inputs(snapshot)
        self._biases.look_for(snapshot.held())

    @on_device
    def _engine_use(self, adapters: AdapterSet) -> None:
        changes, directions = stacked(adapters), summed_directions(adapters)
        embedding_change = changes.pop(EMBEDDING, None)
        needs_inputs = bool(changes or directions)
        if needs_inputs:
            assert self._engine.adapted is not None, "adapters are declared"
            if self._adapted is None:
                sessions = self._engine.adapted(self._kv_type, self._sessions.has_bias)
                self._adapted = Decoders(sessions, partial(_new_feed, self._engine, self._store))
            self._adapted.bind(changes, directions, self._dtype)
        self._decoders = self._adapted if needs_inputs and self._adapted is not None else self._plain
        self._embedding_change = embedding_change

    @on_device
    def _engine_decode(self, batch: Batch) -> Logits:
        return self._run(batch, "logits", check_logits)

    @on_device
    def _engine_embed(self, batch: Batch) -> States:
        return self._run(batch, "states", check_states)

    def _run(self, batch: Batch, output: str, check: Check) -> Logits | States:
        """Run a batch; returns the requested rows of an output."""
        check_position_limit(batch, self._engine.spec.n_positions)
        feed = self._decoders.for_blocks() if batch.ahead.any() else self._decoders.feed
        self._make_room(len(batch.tokens))
        self._moved(self._cells.due(batch.seq_ids))
        outputs = np.flatnonzero(with_last_rows(batch))
        sizes = feed.sizes(len(batch.tokens), self._cells.n_used, len(outputs))
        inputs = dict(self._inputs(batch, sizes, outputs))
        if self._engine.has_states:
            inputs["product_rows"] = np.arange(sizes.rows if output == "logits" else 0)
        rows = feed.run(inputs, output)[: len(outputs)]
        try:
            check(rows)
        except DecodeFailed:
            self._blank(sizes.tokens)
            raise
        is_asked_for = batch.logits_mask[outputs]
        self._cells.append(batch.seq_ids, self._cells.indices(batch.seq_ids, batch.positions))
        return rows if is_asked_for.all() else rows[is_asked_for]

    def _blank(self, n: int) -> None:
        """Zero the next ``n`` cells: padded runs read cells before they are used, and a masked NaN spoils the rows."""
        zeros = bytes(_FIRST_ANGLE.size + n * self._cell_bytes)
        self._transfer.write(self._cells.n_used, self._planes(n, zeros))

    def _inputs(self, batch: Batch, sizes: Sizes, outputs: NDArray[np.intp]) -> Iterator[tuple[str, NDArray[Any]]]:
        dtype = np.dtype(self._dtype)
        tokens, seq_ids, positions = (padded(x, sizes.tokens) for x in (batch.tokens, batch.seq_ids, batch.positions))
        mrope_positions = batch.positions if self._mrope_positions is None else self._mrope_positions.of(batch)
        angles = self._cells.angles(seq_ids, padded(mrope_positions, sizes.tokens))
        has_bias = self._sessions.has_bias
        distances = self._distances(batch, seq_ids, positions, sizes.cells) if has_bias else None
        yield "inputs_embeds", self._embedded(batch, tokens, positions)[None].astype(dtype, copy=False)
        biases = self._key_biases(batch, len(tokens), sizes.cells)
        yield from self._positions.inputs(positions, angles, distances, dtype, biases)
        yield "rows", np.arange(sizes.tokens, dtype=np.int64)[None]
        if self._kv_type is KvType.Q8_0:
            yield "to", np.array([self._cells.n_used], np.int64)
            yield "n_cells", np.array([sizes.cells], np.int64)
        else:
            yield "seqlens_k", np.array([self._cells.n_used + sizes.tokens - 1], np.int32)
            yield "total_sequence_length", np.array(sizes.cells, np.int32)
        yield "logits_rows", padded(outputs, sizes.rows)

    def _distances(
        self, batch: Batch, seq_ids: NDArray[np.int32], positions: NDArray[np.int32], n_cells: int
    ) -> NDArray[np.int32]:
        """The distance from each cell to each token, [n, n_cells]; the tokens of the batch may be padded."""
        n, first = len(batch), self._cells.n_used
        distances = self._cells.distances(seq_ids, self._cells.indices(seq_ids, positions))
        distances[:, first + n :] = _UNSEEN  # no token attends to padding
        if batch.ahead.any():
            ends = np.arange(n) + batch.ahead
            distances[:n, first : first + n][ends[:, None] == ends] = _BESIDE  # inside every window
        n_more = n_cells - distances.shape[1]
        return np.pad(distances, ((0, 0), (0, n_more)), constant_values=_UNSEEN) if n_more else distances

    def _key_biases(self, batch: Batch, n_tokens: int, n_cells: int) -> NDArray[np.float32] | None:
        """The attention bias of each cell for each token, [n_tokens, n_cells], 0 for its own cell; None without any."""
        by_sequence = self._biases.of(batch)
        if not by_sequence:
            return None
        of_cells, first = np.zeros(n_cells, np.float32), self._cells.n_used
        for seq_id, biases in by_sequence.items():
            cells = np.concatenate([self._cells.of(seq_id), first + np.flatnonzero(batch.seq_ids == seq_id)])
            of_cells[cells[: len(biases)]] = biases
        of_tokens, every = np.tile(of_cells, (n_tokens, 1)), np.arange(len(batch))
        of_tokens[every, first + every] = 0
        return of_tokens

    def _embedded(self, batch: Batch, tokens: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.float32]:
        """The input of the first block, [n, E]; tokens and positions may be padded."""
        spec, rows = self._engine.spec, np.flatnonzero(batch.tokens == EMBEDDED)
        ids = np.maximum(tokens, 0) if len(rows) else tokens
        x = _rows(self._engine.embedding, ids)
        if self._embedding_change is not None:
            x = x + self._embedding_change.b[ids] @ self._embedding_change.a
        if len(rows) and spec.scales_rows:
            x[rows] = batch.embeddings
        if spec.embedding_scale != 1:
            x *= np.float32(spec.embedding_scale)
        if len(rows) and not spec.scales_rows:
            x[rows] = batch.embeddings
        if self._engine.position_embedding is not None:
            x += _rows(self._engine.position_embedding, positions)
        return x

    def _make_room(self, n: int) -> None:
        """Compact the cells if ``n`` more do not fit, if most are idle, or if any is idle and there is no bias mask."""
        idle = self._cells.n_idle
        n_most = max(256, self._cells.n_used - idle) if self._sessions.has_bias else 0
        if self._cells.n_used + n > self._cells.n_cells or idle > n_most:
            self._moved(self._cells.compact())

    def _moved(self, move: Move | None) -> None:
        if move is not None:
            self._mover.run(move)

    def _engine_fork(self, src: int, dst: int, end: int) -> None:
        self._cells.fork(src, dst, end)
        self._edited(dst)

    def _engine_truncate(self, seq_id: int, length: int) -> None:
        self._cells.truncate(seq_id, length)
        self._edited(seq_id)

    @on_device
    def _engine_cut(self, seq_id: int, start: int, end: int) -> None:
        n_mrope_positions = (
            end - start if self._mrope_positions is None else self._mrope_positions.between(seq_id, start, end)
        )
        self._make_room(self._cells.n_copied_by_cut(seq_id, start, end, n_mrope_positions))
        self._moved(self._cells.cut(seq_id, start, end, n_mrope_positions))
        self._edited(seq_id)

    def _engine_drop(self, seq_id: int) -> None:
        self._cells.drop(seq_id)
        self._edited(seq_id)

    def _edited(self, seq_id: int) -> None:
        self._biases.forget(seq_id)
        if self._mrope_positions is not None:
            self._mrope_positions.forget(seq_id)

    def _engine_export(self, seq_id: int) -> Pieces:
        return self._engine_export_tail(seq_id, 0)

    @on_device
    def _engine_export_tail(self, seq_id: int, start: int) -> Pieces:
        self._moved(self._cells.due(np.array([seq_id])))
        header, n = _FIRST_ANGLE.pack(self._cells.first_angle(seq_id)), self._ledger.length(seq_id) - start
        # Calls on other sequences may move the cells between two pieces.
        pieces = self._transfer.read(lambda: self._cells.of(seq_id)[start:])
        return Pieces(len(header) + n * self._cell_bytes, itertools.chain([header], pieces))

    def _engine_check_payload(self, n_tokens: int, payload: bytes) -> None:
        _first_angle(payload)
        self._planes(n_tokens, payload)

    @on_device
    def _engine_import(self, seq_id: int, n_tokens: int, payload: bytes) -> None:
        first_angle, planes = _first_angle(payload), self._planes(n_tokens, payload)
        self._make_room(n_tokens)
        self._transfer.write(self._cells.n_used, planes)
        self._cells.begin(seq_id, first_angle)
        self._cells.append(np.full(n_tokens, seq_id, np.int32), np.arange(n_tokens, dtype=np.int32))
        self._edited(seq_id)

    @on_device
    def _engine_writer(self, seq_id: int, n_tokens: int, n_bytes: int) -> PayloadWriter | None:
        self._check_size(n_tokens, n_bytes)
        if n_tokens > self._cells.n_cells - self._cells.n_used + self._cells.n_idle:
            return None
        self._make_room(n_tokens)
        sections = self._transfer.sections(self._cells.n_used, n_tokens)
        return None if sections is None else CellWriter(self._cells, seq_id, n_tokens, sections, self._edited)

    @on_device
    def _engine_tail_writer(self, seq_id: int, src: int, start: int, end: int, n_bytes: int) -> PayloadWriter:
        n = end - start
        self._check_size(n, n_bytes)
        self._make_room(n)
        first = self._cells.n_used
        sections, write = self._transfer.sections(first, n), None
        if sections is None:
            payload = bytearray()
            sections = [Section(n * self._cell_bytes, 1, lambda _, data: payload.extend(data))]

            def write() -> None:
                with self._device_lock:
                    self._transfer.write(first, self._planes(n, _FIRST_ANGLE.pack(0) + payload))

        return CellWriter(self._cells, seq_id, n, sections, self._edited, (src, start), write)

    def _check_size(self, n_tokens: int, n_bytes: int) -> None:
        expected = _FIRST_ANGLE.size + n_tokens * self._cell_bytes
        if n_bytes != expected:
            raise InvalidSnapshot(f"the KV payload has {n_bytes} bytes, {n_tokens} tokens take {expected}")

    @property
    def _cell_bytes(self) -> int:
        """Bytes per token of a payload."""
        parts = ((tensor.shape()[1], part) for (*_, part), tensor in self._store.tensors.items())
        return sum(n_heads * part.width * np.dtype(part.dtype).itemsize for n_heads, part in parts)

    def _planes(self, n_tokens: int, payload: bytes) -> Planes:
        """The keys and values of a payload.

        Raises:
            InvalidSnapshot: the wrong size, or numbers that no model computes.
        """
        shapes = [(tensor.shape()[1], n_tokens, part.width) for (*_, part), tensor in self._store.tensors.items()]
        dtypes = [np.dtype(part.dtype) for *_, part in self._store.tensors]
        return unpacked(payload[_FIRST_ANGLE.size :], shapes, dtypes)

    @on_device
    def _engine_close(self) -> None:
        for decoders in filter(None, (self._plain, self._adapted)):
            decoders.close()
        # ContextBase rejects later calls. These are the last references: the cache is freed now.
        del self._plain, self._adapted, self._decoders, self._mover, self._transfer, self._store
        del self._positions, self._mrope_positions, self._sessions, self._engine, self._cells


class CellWriter(PayloadWriter):
    """Writes the payload of a sequence to free cells.

    Args:
        cells: the table of cells, with room for the sequence.
        seq_id: the sequence.
        n_tokens: number of tokens in the payload.
        sections: the sections of the payload.
        edited: called with the sequence when its contents have changed.
        shared: a sequence and the number of its first positions to share; the payload has the later ones.
        write: writes the payload at the end, if ``sections`` only collect it.
    """

    def __init__(
        self,
        cells: CellTable,
        seq_id: int,
        n_tokens: int,
        sections: Sequence[Section],
        edited: Callable[[int], None],
        shared: tuple[int, int] | None = None,
        write: Callable[[], None] | None = None,
    ) -> None:
        self._cells, self._seq_id, self._n_tokens, self._edited = cells, seq_id, n_tokens, edited
        self._shared, self._write = shared, write
        self._first_angle = 0
        header = Section(1, _FIRST_ANGLE.size, self._read_header)
        self._sections = SectionWriter([header, *sections])
        self._before = cells.holding(seq_id)

    def write(self, piece: memoryview) -> None:
        """Check the numbers of a piece and write it."""
        self._sections.write(piece)

    def put(self) -> None:
        """Exchange the cells of the sequence."""
        self._sections.check_whole()
        if self._shared is not None and self._first_angle != self._cells.first_angle(self._shared[0]):
            raise InvalidSnapshot("sequences of the dump that share keys have them at different angles")
        if self._write is not None:
            self._write()
        self._cells.exchange(self._seq_id, self._first_angle, self._n_tokens, self._shared)
        self._edited(self._seq_id)

    def undo(self) -> None:
        """Restore the previous cells."""
        self._cells.hold(self._seq_id, self._before)
        self._edited(self._seq_id)

    def _read_header(self, _: int, data: bytes) -> None:
        self._first_angle = _first_angle(data)


def _new_feed(engine: Engine, store: KvStore, decoder: Any) -> Feed:
    if not engine.buckets:
        feed = ExactFeed(decoder, store)
        return feed if engine.most_rows is None else SplitFeed(feed, engine.most_rows)
    return FixedFeed(decoder, store, engine.spec.n_vocab, engine.device, engine.numbers, captures=engine.captures)


def _transfer(store: KvStore, sessions: Sessions) -> Transfer:
    return HostTransfer(store) if sessions.transfer is None else DeviceTransfer(store, sessions.transfer)


def _kv_type(engine: Engine, options: ContextOptions) -> KvType:
    """The KV type of a context.

    Raises:
        InvalidOption: an unknown type, or different types for keys and values.
    """
    kv_types = [engine.kv_types[0] if option is None else option for option in (options.kv_type_k, options.kv_type_v)]
    for kv_type in kv_types:
        if kv_type not in engine.kv_types:
            raise InvalidOption(
                f"unknown KV type {str(kv_type)!r} of backend {BACKEND} on {engine.device.label} (accepted:"
                f" {', '.join(engine.kv_types)})"
            )
    if kv_types[0] != kv_types[1]:
        raise InvalidOption(
            f"keys in {kv_types[0]} and values in {kv_types[1]} (accepted by {BACKEND}: one type for both)"
        )
    return KvType(kv_types[0])


def _capabilities(engine: Engine, sessions: Sessions) -> frozenset[Capability]:
    spec, capabilities = engine.spec, {Capability.SHARED_FORK, Capability.KV_PAYLOAD, Capability.EMBEDDING_INPUT}
    if engine.adapted is not None:
        capabilities.add(Capability.ADAPTERS)
    if engine.has_states:
        capabilities.add(Capability.EMBEDDINGS)
    if sessions.bidirectional is not None and spec.alibi_max_bias is None:  # ALiBi is not defined for a later key
        capabilities.add(Capability.BIDIRECTIONAL_BLOCKS)
    if spec.has_sections:
        capabilities.add(Capability.MROPE_POSITIONS)
    if engine.device.is_cpu:  # its graphs always have the input
        capabilities.add(Capability.ATTENTION_BIAS)
    return frozenset(capabilities)


def _rows(tensor: QuantizedTensor, which: NDArray[np.int32]) -> NDArray[np.float32]:
    return dequantize_rows(tensor.data, tensor.ggml_type, tensor.shape[1], which)


def _first_angle(payload: bytes) -> int:
    if len(payload) < _FIRST_ANGLE.size:
        raise InvalidSnapshot(f"the KV payload has {len(payload)} bytes, less than its header")
    (angle,) = _FIRST_ANGLE.unpack_from(payload)
    if not 0 <= angle <= FARTHEST:
        raise InvalidSnapshot(f"the KV payload begins at position {angle} (accepted: 0 to {FARTHEST})")
    return int(angle)
