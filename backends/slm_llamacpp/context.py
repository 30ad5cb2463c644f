"""A context: a KV cache of llama.cpp behind the contract."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.adapters import AdapterSet
from slm_core.container import Pieces
from slm_core.context import ContextBase, check_context_options, check_position_limit
from slm_core.context.batch import TokenBatch
from slm_core.context.finite import Check, check_logits, check_states, with_last_rows
from slm_core.context.inputs import Held, add_held, chunks_of
from slm_core.context.ledger import replay_plan, tail_edits
from slm_core.context.payload import PIECE_BYTES, PayloadWriter
from slm_core.errors import DecodeFailed, InvalidOption, InvalidSnapshot, UnsupportedEdit
from slm_core.protocols import Batch
from slm_core.types import Capability, ContextOptions, EditLevel, KvType, Logits, Pos, States
from slm_llamacpp import BACKEND, library, logs
from slm_llamacpp.batchbuffers import BatchBuffers, Part, parts_of_a_kind
from slm_llamacpp.forks import before_computing
from slm_llamacpp.memory import Cells, Memory, n_llama_sequences
from slm_llamacpp.options import Settings
from slm_llamacpp.payload import BYTES_PER_NUMBER, GGML_TYPES, check_payload
from slm_llamacpp.preflight import TOKENS_ALONE

if TYPE_CHECKING:
    from slm_llamacpp.model import LlamaCppModel

Rows: TypeAlias = NDArray[np.float32]

_QUANTIZED = (KvType.Q8_0, KvType.Q5_0, KvType.Q4_0)
_QUANTIZED_BLOCK = 32
_ROTATION_WIDTH = 64  # llama.cpp can re-rotate quantized keys only if the head width is a multiple of it
_MAX_CTX = 2**31 - 256  # positions are int32, and llama.cpp rounds up
_NO_ROOM = 1
_ALWAYS = {Capability.EMBEDDINGS, Capability.ADAPTERS}
_FAILURES = {_NO_ROOM: "it found no room in its KV cache", 2: "it was aborted", -1: "it calls the batch invalid"}
_FEW_SEQUENCES = 8  # as for a chat and its forks, which share most of their cells
_FLASH_OFF, _FLASH_ON, _FLASH_AUTO = 0, 1, -1  # llama_flash_attn_type


class LlamaCppContext(ContextBase):
    """Several token histories in one KV cache of llama.cpp.

    Args:
        model: the model; the context keeps it alive.
        api: the low-level functions.
        model_pointer: llama.cpp's pointer to the model.
        options: the sizes and KV types.
        settings: device, threads and options of the model.

    Raises:
        InvalidOption: llama.cpp cannot create such a context; the message gives its reason.
    """

    def __init__(
        self, model: LlamaCppModel, api: Any, model_pointer: int, options: ContextOptions, settings: Settings
    ) -> None:
        check_context_options(options)
        self._api = api
        self._model = model
        self._type_k, self._type_v = kv_type(options.kv_type_k), kv_type(options.kv_type_v)
        flash = flash_attention(settings, (self._type_k, self._type_v), options.n_seq_max)
        check_key_type(self._type_k, model.head_dim)
        self._check_memory(model_pointer, options, settings)
        self._pointer = self._create(model_pointer, options, settings, flash)
        self._free = weakref.finalize(self, api.llama_free, self._pointer)
        self._free.atexit = False  # at exit the system frees the memory
        self._memory = Memory(api, self._pointer, model_pointer, options.n_seq_max)
        n_batch = min(options.n_batch, options.n_ctx)
        self._buffers = BatchBuffers(api, n_batch, self._memory.ids(), self._memory.n_axes)
        self._used: AdapterSet = ()  # keeps the adapters alive: llama.cpp computes with pointers to them
        self._has_nan = False  # whether cells of a failed call may hold NaN
        self._keys_lag = False  # whether keys are still to be re-rotated, which llama.cpp does at the next decode
        can_move = model.moves_keys and can_rotate(self._type_k, model.head_dim)
        longest_block = min(api.llama_n_ubatch(self._pointer), model.longest_block)
        blocks = {Capability.BIDIRECTIONAL_BLOCKS} if n_batch <= longest_block else set()
        super().__init__(
            options,
            backend=BACKEND,
            fingerprint=model.info.fingerprint,
            n_vocab=model.vocab.size,
            edit_level=self._memory.edit_level(can_rotate=can_move),
            capabilities=self._memory.capabilities() | _ALWAYS | self._inputs(model_pointer, blocks),
            payload_format=f"llama.cpp {library.version()} {api.llama_version().decode()} k={self._type_k}"
            f" v={self._type_v} flash={flash} {settings.device.label}",
            n_embd=api.llama_model_n_embd_out(model_pointer),
            adapters=model.loaded_adapters,
        )

    def _inputs(self, model_pointer: int, blocks: set[Capability]) -> frozenset[Capability]:
        """The capabilities for embedding rows and bidirectional blocks.

        There are none for models with which llama.cpp would end the process, or that need more inputs than embeddings.
        """
        widths = {getattr(self._api, f"llama_model_n_embd{kind}")(model_pointer) for kind in ("", "_inp", "_out")}
        takes_rows = len(widths) == 1 and self._model.info.architecture not in TOKENS_ALONE
        return frozenset({Capability.EMBEDDING_INPUT, *blocks} if takes_rows else ())

    def _create(self, model_pointer: int, options: ContextOptions, settings: Settings, flash: int) -> int:
        api = self._api
        n_sequences = n_llama_sequences(api, model_pointer, options.n_seq_max)
        if n_sequences > api.llama_max_parallel_sequences():
            most = api.llama_max_parallel_sequences() * options.n_seq_max // n_sequences
            raise InvalidOption(f"n_seq_max={options.n_seq_max} (accepted by llama.cpp for this model: 1 to {most})")
        params = api.llama_context_default_params()
        # llama.cpp ends the process if the capacity of a batch is below the number of sequences.
        params.n_ctx = max(options.n_ctx, n_sequences)
        params.n_batch = max(min(options.n_batch, options.n_ctx), n_sequences)
        params.n_seq_max = n_sequences
        params.n_ubatch = min(settings.options.n_ubatch or params.n_ubatch, params.n_batch)
        params.n_threads = params.n_threads_batch = settings.n_threads
        params.type_k, params.type_v = GGML_TYPES[self._type_k], GGML_TYPES[self._type_v]
        params.flash_attn_type = flash
        params.pooling_type = api.LLAMA_POOLING_TYPE_NONE
        params.offload_kqv = settings.options.offload_kv is not False
        params.kv_unified = params.swa_full = params.no_perf = True
        return created(api, model_pointer, params, options)

    def _check_memory(self, model_pointer: int, options: ContextOptions, settings: Settings) -> None:
        """Raise if the KV cache exceeds the memory: llama.cpp zeroes it, and the system would end the process."""
        if options.n_ctx > _MAX_CTX:
            raise InvalidOption(f"n_ctx={options.n_ctx} (accepted by llama.cpp: 1 to {_MAX_CTX})")
        if sys.platform != "linux" or (settings.device.gpus and settings.options.offload_kv is not False):
            return
        api, head_dim = self._api, self._model.head_dim or 0
        n_numbers = api.llama_model_n_layer(model_pointer) * api.llama_model_n_head_kv(model_pointer) * head_dim
        needed = options.n_ctx * n_numbers * (BYTES_PER_NUMBER[self._type_k] + BYTES_PER_NUMBER[self._type_v])
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > available:
            raise InvalidOption(
                f"n_ctx={options.n_ctx} takes {needed / 2**30:.0f} GiB of keys and values, and this machine has"
                f" {available / 2**30:.0f} GiB: choose a smaller n_ctx or kv_type"
            )

    # The methods that ContextBase requires.

    def _engine_use(self, adapters: AdapterSet) -> None:
        self._model.lora.use(self._pointer, adapters)
        self._used = adapters

    def _engine_take_back(self, seq_id: int, length: int) -> None:
        self._sync(seq_id)

    def _engine_decode(self, batch: Batch) -> Logits:
        mask = with_last_rows(batch)
        rows, is_asked_for = self._ran(batch, mask, self._rows, check_logits), batch.logits_mask[mask]
        return rows if is_asked_for.all() else rows[is_asked_for]

    def _engine_embed(self, batch: Batch) -> States:
        """Run the batch with all outputs, as llama.cpp returns states of all tokens or none; then apply the mask."""
        self._api.llama_set_embeddings(self._pointer, True)
        try:
            every = np.ones(len(batch), np.bool_)
            return self._ran(batch, every, self._states, check_states)[batch.logits_mask]
        finally:
            self._api.llama_set_embeddings(self._pointer, False)

    def _ran(self, batch: Batch, output_mask: NDArray[np.bool_], read: Callable[[int], Rows], check: Check) -> Rows:
        """The rows of a batch. If they are not finite, that may be due to cells of an earlier batch."""
        if self._model.positions is not None:
            check_position_limit(batch, *self._model.positions)
        try:
            return self._ran_once(batch, output_mask, read, check)
        except DecodeFailed:
            if not self._has_nan:
                raise
        self._renew()
        self._use_adapters_of(int(batch.seq_ids[0]))
        return self._ran_once(batch, output_mask, read, check)

    def _ran_once(
        self, batch: Batch, output_mask: NDArray[np.bool_], read: Callable[[int], Rows], check: Check
    ) -> Rows:
        sequences = np.unique(batch.seq_ids).tolist()
        for seq_id in sequences:
            self._sync(seq_id)
        try:
            results = []
            for part in parts_of_a_kind(batch, self._positions(batch), output_mask, self._model.table_rows):
                self._run_part(part)
                results.append(read(int(np.count_nonzero(part.output_mask))))
            rows = results[0] if len(results) == 1 else np.concatenate(results)
            self._check(check, rows)
            return rows
        except BaseException:  # also after an interrupt, the context must be unchanged
            for seq_id in sequences:
                self._sync(seq_id)
            raise

    def _engine_fork_cost(self, src: int, end: int) -> int:
        self._check_fork(src, end)
        return super()._engine_fork_cost(src, end)

    def _engine_fork(self, src: int, dst: int, end: int) -> None:
        self._sync(src)
        self._check_fork(src, end)
        self._memory.share(src, dst, end)

    def _engine_truncate(self, seq_id: int, length: int) -> None:
        self._sync(seq_id)
        self._memory.remove(seq_id, length)

    def _engine_cut(self, seq_id: int, start: int, end: int) -> None:
        self._sync(seq_id)
        n_shared = max(0, self._ledger.cut_cost(seq_id, start, end))
        if n_shared:
            self._unshare(seq_id, start, end, end + n_shared)
        else:
            self._memory.remove(seq_id, start, end)
        self._memory.move_down(seq_id, end, end - start)
        self._keys_lag = True

    def _engine_drop(self, seq_id: int) -> None:
        self._memory.remove(seq_id, 0)

    def _engine_export(self, seq_id: int) -> Pieces:
        """The payload of a sequence. llama.cpp copies it as a whole, before the first piece is requested."""
        self._sync(seq_id)
        self._rotate_keys()
        return _pieces(self._memory.dump(seq_id))

    def _engine_export_tail(self, seq_id: int, start: int) -> Pieces:
        self._sync(seq_id)
        self._rotate_keys()
        return _pieces(self._dumped_part(seq_id, start, self._ledger.length(seq_id)))

    def _engine_tail_writer(self, seq_id: int, src: int, start: int, end: int, n_bytes: int) -> PayloadWriter:
        def put(payload: bytes) -> None:
            check_payload(payload, end - start, self._type_k, self._type_v, start)
            self._sync(src)
            self._memory.share(src, seq_id, start)
            self._take_over(seq_id, payload, end)

        return _JoinedWriter(put, lambda: self._memory.remove(seq_id, 0))

    def _dumped_part(self, seq_id: int, start: int, end: int) -> Cells:
        """The cells [start, end) of a sequence."""
        memory, scratch = self._memory, self._memory.scratch
        memory.share(seq_id, scratch, end, start=start)
        try:
            return memory.dump(scratch)
        finally:
            memory.remove(scratch, 0)

    def _take_over(self, seq_id: int, cells: bytes | Cells, end: int) -> None:
        """Load dumped cells as exclusive cells of a sequence, in addition to its present cells.

        Raises:
            DecodeFailed: llama.cpp refuses the cells.
        """
        memory, scratch = self._memory, self._memory.scratch
        if not memory.load(scratch, cells):
            raise DecodeFailed("llama.cpp could not take in cells that were dumped")
        memory.share(scratch, seq_id, end)
        memory.remove(scratch, 0)

    def _engine_check_payload(self, n_tokens: int, payload: bytes) -> None:
        check_payload(payload, n_tokens, self._type_k, self._type_v)

    def _engine_import(self, seq_id: int, n_tokens: int, payload: bytes) -> None:
        with logs.collected() as complaints:
            if not self._memory.load(seq_id, payload):
                raise InvalidSnapshot(f"llama.cpp refuses the dump's KV payload: {logs.reason_in(complaints)}")

    def _engine_close(self) -> None:
        self._free()
        library.return_memory()

    # Decoding.

    def _check_fork(self, src: int, end: int) -> None:
        if self.edit_level < EditLevel.TRUNCATE and end < self._ledger.length(src):
            raise UnsupportedEdit(
                f"this context cannot fork a part of sequence {src} (its edit level is {self.edit_level.name}):"
                " fork all of it, or decode the tokens of the part",
                seq_id=src,
            )

    def _run_part(self, part: Part) -> None:
        """Decode a part. llama.cpp has one causal mask per batch, on or off; other sequences are always masked."""
        if part.is_block:
            self._api.llama_set_causal_attn(self._pointer, False)
        try:
            self._run(self._buffers.fill(*part[:-1]))
        finally:
            if part.is_block:
                self._api.llama_set_causal_attn(self._pointer, True)

    def _run(self, batch: Any) -> None:
        before_computing(self._api, self._pointer)
        with logs.collected() as complaints:
            failure = self._api.llama_decode(self._pointer, batch)
        if failure:
            why = _FAILURES.get(failure, f"{logs.reason_in(complaints)} (code {failure})")
            raise DecodeFailed(f"llama.cpp could not decode: {why}")
        self._keys_lag = False

    def _rows(self, n_rows: int) -> Logits:
        return copied(self._api.llama_get_logits(self._pointer) if n_rows else None, n_rows, self._n_vocab)

    def _states(self, n_rows: int) -> States:
        return copied(self._api.llama_get_embeddings(self._pointer), n_rows, self._n_embd)

    def _check(self, check: Check, rows: Rows) -> None:
        try:
            check(rows)
        except DecodeFailed:
            self._has_nan = True
            raise

    def _renew(self) -> None:
        """Zero the cache and decode all sequences again.

        Without flash attention, llama.cpp reads the cells of all sequences, also of removed ones, and masks them
        afterwards: NaN in one of them spoils all rows, and no call overwrites a cell.
        """
        logs.logger.warning("decoding all sequences again: the KV cache holds NaN of a call that failed")
        self._memory.clear()
        self._has_nan = self._keys_lag = False
        done: list[int] = []
        for seq_id, length in self._ledger.lengths().items():
            if length:
                self._use_adapters_of(seq_id)
                self._refill(seq_id, done)
                done.append(seq_id)

    def _refill(self, seq_id: int, others: Sequence[int]) -> None:
        """Decode a sequence again, except for cells that it shares with one of ``others``: these exist already."""
        n, src = max(((self._ledger.n_shared(seq_id, other), other) for other in others), default=(0, 0))
        can_share = n == self._ledger.length(src) or self.edit_level >= EditLevel.TRUNCATE
        if n == 0 or not can_share or tail_edits(self._ledger.edits(seq_id), n) != []:
            self._rebuild(seq_id)
            return
        self._memory.share(src, seq_id, n)
        tail = self._ledger.inputs(seq_id)[n:]
        self._replay(seq_id, n, tail, self._positions_of(tail, n))

    def _sync(self, seq_id: int) -> None:
        """Make llama.cpp's sequence equal to the ledger; a failure or an interrupt may have changed it."""
        held, length = self._memory.length(seq_id), self._ledger.length(seq_id)
        if held == length:
            return
        logs.logger.debug("sequence %d held %d tokens in llama.cpp, %d by the ledger", seq_id, held, length)
        if held > length and (length == 0 or self.edit_level >= EditLevel.TRUNCATE):
            self._memory.remove(seq_id, length)
        else:
            self._rebuild(seq_id)

    def _rebuild(self, seq_id: int) -> None:
        self._memory.remove(seq_id, 0)
        edits = self._ledger.edits(seq_id)
        runs, _ = replay_plan(self._ledger.inputs(seq_id), edits)
        length = 0
        for run, edit in zip(runs, (*edits, None), strict=True):
            self._replay(seq_id, length, run, self._positions_of(run, length))
            length += len(run)
            if edit is not None:
                self._memory.remove(seq_id, edit.start, edit.end)
                self._memory.move_down(seq_id, edit.end, len(edit.removed))
                self._keys_lag = True
                length -= len(edit.removed)

    def _replay(self, seq_id: int, start: int, tokens: Sequence[Held], positions: NDArray[np.integer]) -> None:
        done = 0
        for chunk in chunks_of(tokens, self.n_batch):
            batch = TokenBatch(self.n_batch)
            add_held(batch, chunk, Pos(seq_id, start + done))
            theirs = positions[done : done + len(chunk)]
            for part in parts_of_a_kind(batch, theirs, batch.logits_mask, self._model.table_rows):
                self._run_part(part)
            done += len(chunk)

    def _positions(self, batch: Batch) -> NDArray[np.integer]:
        """The positions that llama.cpp gets; see ``parts_of_a_kind``."""
        return batch.positions

    def _positions_of(self, tokens: Sequence[Held], start: int) -> NDArray[np.integer]:
        """The positions of tokens in a replay; the first is at ``start``."""
        return np.arange(start, start + len(tokens))

    def _unshare(self, seq_id: int, start: int, end: int, shared_end: int) -> None:
        """Remove [start, end), and give the sequence exclusive copies of the cells [end, shared_end).

        Moving a cell would move it for every sequence that holds it. Cells are shared from position 0 on, so all cells
        of [start, shared_end) are shared, and removing them frees none. The copies are made first, so a failure needs
        no undo.
        """
        memory, scratch = self._memory, self._memory.scratch
        self._rotate_keys()
        cells = self._dumped_part(seq_id, end, shared_end)
        if not memory.load(scratch, cells):
            raise DecodeFailed("llama.cpp could not copy the cells that another sequence shares")
        memory.remove(seq_id, start, shared_end)
        memory.share(scratch, seq_id, shared_end)
        memory.remove(scratch, 0)

    def _rotate_keys(self) -> None:
        """Make llama.cpp re-rotate keys now. It does so at the beginning of a decode.

        Dumps contain keys as they are, so this is needed before a dump. If the cache has no room for the token that is
        decoded here, the decode fails, but only after the re-rotation.
        """
        if not self._keys_lag:
            return
        zero, nothing = np.zeros(1, np.int32), np.zeros(1, np.bool_)
        batch = self._buffers.fill(zero, np.full(1, self._memory.scratch, np.int32), zero, nothing)
        before_computing(self._api, self._pointer)
        try:
            failure = self._api.llama_decode(self._pointer, batch)
        finally:
            self._memory.remove(self._memory.scratch, 0)
        if failure not in (0, _NO_ROOM):
            raise DecodeFailed(f"llama.cpp could not re-rotate keys (code {failure})")
        self._keys_lag = False


def _pieces(cells: Cells) -> Pieces:
    data = memoryview(cells).cast("B")
    return Pieces(len(data), (data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)))


class _JoinedWriter(PayloadWriter):
    """Collects a payload, as llama.cpp loads it as a whole.

    Args:
        put: loads the payload.
        undo: empties the sequence.
    """

    def __init__(self, put: Callable[[bytes], None], undo: Callable[[], None]) -> None:
        self._put, self._undo = put, undo
        self._pieces: list[bytes] = []

    def write(self, piece: memoryview) -> None:
        """Append a piece."""
        self._pieces.append(bytes(piece))

    def put(self) -> None:
        """Check the payload and load it."""
        self._put(b"".join(self._pieces))

    def undo(self) -> None:
        """Empty the sequence."""
        self._undo()


def created(api: Any, model_pointer: int, params: Any, options: ContextOptions) -> int:
    """Create a context of llama.cpp.

    Raises:
        InvalidOption: llama.cpp cannot create it.
    """
    with logs.collected() as complaints:
        pointer: int | None = api.llama_init_from_model(model_pointer, params)
    if not pointer:
        raise InvalidOption(f"llama.cpp cannot create this context: {logs.reason_in(complaints)} ({options})")
    return pointer


def copied(source: Any, n_rows: int, width: int) -> Rows:
    """Copy rows that llama.cpp overwrites in its next call; ``source`` is its pointer to them."""
    rows = np.empty((n_rows, width), np.float32)
    if n_rows:
        if not source:
            raise DecodeFailed("llama.cpp gave no rows")
        ctypes.memmove(rows.ctypes.data, source, rows.nbytes)
    return rows


def kv_type(asked: KvType | None) -> KvType:
    """The KV type, F16 by default.

    Raises:
        InvalidOption: an unknown type.
    """
    if asked is not None and asked not in GGML_TYPES:
        raise InvalidOption(f"unknown KV type {str(asked)!r} (accepted: {', '.join(GGML_TYPES)})")
    return KvType.F16 if asked is None else KvType(asked)


def flash_attention(settings: Settings, types: tuple[KvType, KvType], n_seq_max: int) -> int:
    """The ``llama_flash_attn_type`` for these settings.

    On a CPU, each choice has an advantage. Without flash attention, each token is multiplied by the cells of all
    sequences, including masked cells. With flash attention, masked cells are skipped, but the other cells take longer,
    and keys and values are rounded to f16. So by default it is on for many sequences, as engines have, if keys and
    values are stored in f16 anyway.

    Args:
        settings: the options of the model.
        types: the types of keys and of values.
        n_seq_max: the sequences of the context.

    Raises:
        InvalidOption: flash attention is off, but quantized values need it.
    """
    asked, type_v = settings.options.flash_attention, types[1]
    if asked is False and type_v in _QUANTIZED:
        raise InvalidOption(
            f'kv_type_v={type_v} needs flash attention, which is off (accepted: flash_attention=True, "auto")'
        )
    if asked is not None:
        return _FLASH_ON if asked else _FLASH_OFF
    if settings.device.gpus or (n_seq_max > _FEW_SEQUENCES and set(types) == {KvType.F16}):
        return _FLASH_AUTO  # on, except for models that llama.cpp cannot run with it
    return _FLASH_ON if type_v in _QUANTIZED else _FLASH_OFF


def check_key_type(type_k: KvType, head_dim: int | None) -> None:
    """Refuse key types for which llama.cpp computes wrong results: it checks them only with flash attention.

    Raises:
        InvalidOption: the blocks of quantized keys do not fit the heads.
    """
    if type_k in _QUANTIZED and (head_dim is None or head_dim % _QUANTIZED_BLOCK):
        width = "of several widths" if head_dim is None else f"{head_dim} wide"
        raise InvalidOption(
            f"kv_type_k={type_k} packs blocks of {_QUANTIZED_BLOCK}, and this model's heads are {width}"
            f" (accepted: {', '.join(kind for kind in GGML_TYPES if kind not in _QUANTIZED)})"
        )


def can_rotate(type_k: KvType, head_dim: int | None) -> bool:
    """Whether llama.cpp can re-rotate keys of a type and head width (None: unknown, or several)."""
    if type_k not in _QUANTIZED:
        return type_k is not KvType.BF16
    is_disabled = os.environ.get("LLAMA_ATTN_ROT_DISABLE", "0") != "0"
    return not is_disabled and head_dim is not None and head_dim % _ROTATION_WIDTH == 0
