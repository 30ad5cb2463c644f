"""The base class of contexts: argument checks, room, the ledger, dumps and their replay.

A backend derives from ``ContextBase`` and writes the ``_engine_*`` methods. Their arguments are checked, and there is
room for the result. If a method raises, it has to leave the engine as it was; then the context is unchanged, too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from slm_core.adapters import AdapterSet, LoadedAdapters
from slm_core.container import PART_BYTES, Incoming, Pieces, pack_parts
from slm_core.context import picture
from slm_core.context.batch import TokenBatch
from slm_core.context.checks import Checks, Declaration, check_context_options, check_part_bytes, failures_of
from slm_core.context.engine_calls import EngineCalls
from slm_core.context.inputs import (
    Held,
    add_held,
    ahead_of,
    all_ahead_of,
    batch_inputs,
    chunks_of,
    offsets_of,
    rows_of,
    token_ids,
)
from slm_core.context.ledger import Ledger, replay_plan, tail_edits
from slm_core.context.payload import PayloadWriter, Receiver, Steps, whole
from slm_core.context.sequence_adapters import (
    R,
    SequenceAdapters,
    are_equal,
    dumped_scales,
    in_batch_order,
    part_of,
    scales_of,
)
from slm_core.context.snapshot import Edit, PayloadHeader, SequenceSnapshot, Share, read_shares
from slm_core.errors import (
    ContextBusy,
    ContextClosed,
    InvalidOption,
    InvalidPosition,
    InvalidSequence,
    InvalidSnapshot,
    SequenceChanged,
    SlmError,
    UnsupportedOutput,
)
from slm_core.protocols import Batch
from slm_core.types import Capability, ContextOptions, EditLevel, Logits, Pos, States, TopLogits


def no_top_logits(k: int) -> TopLogits:
    """The result of ``decode_top`` for no rows."""
    return TopLogits(np.empty((0, k), np.int32), np.empty((0, k), np.float32), np.empty(0, np.float32))


def _kept(rows: R) -> R:
    """Rows that stay valid after the next call of the engine."""
    return rows if isinstance(rows, TopLogits) else np.array(rows)


def _runs(batch: Batch, seq_ids: Sequence[int]) -> dict[int, Sequence[Held]]:
    """The inputs of a batch, by sequence. They are read before the engine runs, so a failure here changes nothing."""
    inputs, of = batch_inputs(batch), batch.seq_ids
    if len(seq_ids) == 1:
        return {seq_ids[0]: inputs}
    return {seq_id: [inputs[i] for i in np.flatnonzero(of == seq_id).tolist()] for seq_id in seq_ids}


class ContextBase(EngineCalls):
    """The bookkeeping of a context. ``protocols.Context`` documents the calls.

    Args:
        options: the sizes.
        backend: name of the backend, for dumps.
        fingerprint: fingerprint of the model, for dumps.
        n_vocab: vocabulary size V.
        edit_level: the edit level.
        capabilities: the optional capabilities.
        payload_format: name of the layout of KV payloads; a payload of the same backend and format is loaded as it is.
        n_embd: embedding width E; needed for ``EMBEDDINGS`` (hidden states) and ``EMBEDDING_INPUT`` (embedding rows).
        adapters: the adapters of the model, if ``ADAPTERS`` is among the capabilities.
    """

    def __init__(
        self,
        options: ContextOptions,
        *,
        backend: str,
        fingerprint: str,
        n_vocab: int,
        edit_level: EditLevel,
        capabilities: frozenset[Capability],
        payload_format: str,
        n_embd: int = 0,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        check_context_options(options)
        self._declared = Declaration(
            options=options,
            backend=backend,
            fingerprint=fingerprint,
            n_vocab=n_vocab,
            edit_level=edit_level,
            capabilities=capabilities,
            payload_format=payload_format,
            n_embd=n_embd,
        )
        self._n_vocab = n_vocab
        self._n_embd = n_embd
        share_forks = Capability.SHARED_FORK in capabilities
        self._ledger = Ledger(options.n_ctx, options.n_seq_max, share_forks=share_forks)
        self._checks = Checks(self._declared, self._ledger)
        loaded = adapters if Capability.ADAPTERS in capabilities else None
        self._adapters = SequenceAdapters(loaded)
        self._lock = threading.Lock()
        self._closed = False
        self._steps: weakref.WeakSet[Steps[Any]] = weakref.WeakSet()  # dumps and restores that are still valid
        self._writers: dict[int, PayloadWriter] = {}  # by sequence: the storage reserved by restores in steps

    def __repr__(self) -> str:
        return picture.line(self, None if self._closed else self._ledger.lengths())

    def _repr_html_(self) -> str:
        if self._closed:
            return picture.page(self, None, None)
        return picture.page(self, self._ledger.lengths(), self._ledger.references())

    # Properties.

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The optional capabilities of this context."""
        return self._declared.capabilities

    @property
    def edit_level(self) -> EditLevel:
        """The edit level."""
        return self._declared.edit_level

    @property
    def options(self) -> ContextOptions:
        """The options that ``new_context`` got: sizes and KV types."""
        return self._declared.options

    @property
    def n_ctx(self) -> int:
        """Positions of the KV cache, for all sequences together."""
        return self._declared.options.n_ctx

    @property
    def n_batch(self) -> int:
        """The most tokens of one ``decode``."""
        return self._declared.options.n_batch

    @property
    def n_seq_max(self) -> int:
        """The number of sequences."""
        return self._declared.options.n_seq_max

    @property
    def n_free(self) -> int:
        """Free positions."""
        return self._ledger.n_free

    def length(self, seq_id: int) -> int:
        """The number of tokens of a sequence."""
        self._check_open()
        return self._ledger.length(self._checks.sequence(seq_id))

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """The tokens of a sequence, in order; ``EMBEDDED`` for each embedding row."""
        self._check_open()
        return tuple(token_ids(self._ledger.inputs(self._checks.sequence(seq_id))))

    def n_exclusive(self, seq_id: int) -> int:
        """The number of positions that ``drop`` would free."""
        self._check_open()
        return self._ledger.n_exclusive(self._checks.sequence(seq_id))

    def adapters(self, seq_id: int) -> Mapping[str, float]:
        """The adapters of a sequence, by name, with their scales."""
        self._check_open()
        return scales_of(self._adapters.of(self._checks.sequence(seq_id)))

    def new_batch(self, capacity: int | None = None) -> Batch:
        """An empty batch of at most ``n_batch`` tokens."""
        self._check_open()
        if capacity is not None and not 1 <= capacity <= self.n_batch:
            raise InvalidOption(f"batch capacity is {capacity} (accepted: 1 to n_batch, which is {self.n_batch})")
        return TokenBatch(self.n_batch if capacity is None else capacity)

    # Calls.

    def decode(self, batch: Batch) -> Logits:
        """Run a batch; returns the requested rows of logits, float32 [n_rows, V]."""
        with self._call():
            if Capability.ENCODER in self._declared.capabilities:
                raise UnsupportedOutput("this model is an encoder: it has hidden states (embed), and no logits")
            seq_ids = self._check_batch(batch)
            if not seq_ids:
                return np.empty((0, self._n_vocab), np.float32)
            runs = _runs(batch, seq_ids)
            with failures_of(seq_ids):
                rows = self._by_adapters(batch, seq_ids, self._engine_decode)
            self._append(runs)
        return rows

    def decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Run a batch; returns the k largest logits of each requested row."""
        with self._call():
            if Capability.DEVICE_SAMPLING not in self._declared.capabilities:
                raise UnsupportedOutput(
                    f"the backend {self._declared.backend} gives whole rows of logits alone: decode"
                )
            if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= self._n_vocab:
                raise InvalidOption(f"k={k!r} (accepted: 1 to {self._n_vocab}, the size of the vocabulary)")
            seq_ids = self._check_batch(batch)
            if not seq_ids:
                return no_top_logits(k)
            runs = _runs(batch, seq_ids)
            with failures_of(seq_ids):
                top = self._by_adapters(batch, seq_ids, lambda part: self._engine_decode_top(part, k))
            self._append(runs)
        return top

    def embed(self, batch: Batch) -> States:
        """Run a batch; returns the requested hidden states, float32 [n_rows, E]."""
        with self._call():
            if Capability.EMBEDDINGS not in self._declared.capabilities:
                raise UnsupportedOutput(f"the backend {self._declared.backend} gives no hidden states of this model")
            seq_ids = self._check_batch(batch)
            if not seq_ids:
                return np.empty((0, self._n_embd), np.float32)
            runs = _runs(batch, seq_ids)
            with failures_of(seq_ids):
                rows = self._by_adapters(batch, seq_ids, self._engine_embed)
            if Capability.ENCODER not in self._declared.capabilities:
                self._append(runs)
        return rows

    def set_adapters(self, seq_id: int, scales: Mapping[str, float]) -> None:
        """Give an empty sequence the loaded adapters of these names, with their scales, in place of its own."""
        with self._call():
            adapters = self._adapters.named(scales)
            if are_equal(adapters, self._adapters.of(self._checks.changeable(seq_id))):
                return
            if length := self._ledger.length(seq_id):
                raise InvalidSequence(
                    f"the {length} tokens of sequence {seq_id} were decoded with other adapters: drop it first",
                    seq_id=seq_id,
                )
            self._adapters.put(seq_id, adapters)

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Make the empty sequence ``dst`` a copy of ``src[:end]``."""
        with self._call():
            self._checks.sequence(src)
            self._checks.changeable(dst)
            if src == dst or self._ledger.length(dst):
                raise InvalidSequence(
                    f"cannot fork {src} into {dst}: the destination must be another, empty sequence", seq_id=dst
                )
            length = self._forked_length(src, end)
            n_copied = self._n_copied_by_fork(src, length)
            self._checks.room(self._ledger.fork_cost(length, n_copied), dst)
            if length:
                with failures_of((dst,)):
                    self._use_adapters_of(src)
                    self._engine_fork(src, dst, length)
                self._ledger.fork(src, dst, length, n_copied)
            self._adapters.put(dst, self._adapters.of(src))
        return Pos(dst, length)

    def fork_cost(self, src: int, end: int | None = None) -> int:
        """The number of tokens that ``fork(src, dst, end)`` would decode again."""
        with self._call():
            length = self._forked_length(self._checks.sequence(src), end)
            return self._engine_fork_cost(src, length) if length else 0

    def truncate(self, pos: Pos) -> Pos:
        """Forget the tokens of a sequence from ``pos.index`` on."""
        with self._call():
            self._checks.level(EditLevel.TRUNCATE)
            index = self._checks.index(self._checks.sequence(pos.seq_id), pos.index)
            self._checks.whole_blocks(pos.seq_id, index)
            if index < self._ledger.length(pos.seq_id):
                with failures_of((pos.seq_id,)):
                    self._use_adapters_of(pos.seq_id)
                    self._engine_truncate(pos.seq_id, index)
                self._ledger.truncate(pos.seq_id, index)
        return pos

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Forget [start, end) of one sequence; later tokens move down."""
        with self._call():
            self._checks.level(EditLevel.CUT)
            if start.seq_id != end.seq_id:
                raise InvalidSequence(f"a cut has one sequence, not {start.seq_id} and {end.seq_id}")
            seq_id = self._checks.sequence(start.seq_id)
            first, last = self._checks.index(seq_id, start.index), self._checks.index(seq_id, end.index)
            if last < first:
                raise InvalidPosition(
                    f"a cut of sequence {seq_id} ends at {last}, before its start {first}", seq_id=seq_id
                )
            if first < last:
                if last == self._ledger.length(seq_id):
                    self._checks.whole_blocks(seq_id, first)
                self._cut(seq_id, first, last)
            return Pos(seq_id, self._ledger.length(seq_id))

    def drop(self, seq_id: int) -> None:
        """Forget one sequence."""
        with self._call():
            self._drop(self._checks.sequence(seq_id))

    def clear(self) -> None:
        """Forget all sequences."""
        with self._call():
            for seq_id in range(self.n_seq_max):
                self._drop(seq_id)

    def dump(self, seq_id: int) -> bytes:
        """Dump a sequence."""
        with self._call(), failures_of((self._checks.sequence(seq_id),)):
            return b"".join(self._packed(seq_id))

    def dump_parts(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """The bytes of ``dump`` in parts. Other sequences may change between parts."""
        with self._call():
            check_part_bytes(part_bytes)
            with failures_of((self._checks.sequence(seq_id),)):
                parts = self._packed(seq_id, part_bytes)
            revision = self._ledger.revision(seq_id)
            dump = Steps(parts, lambda: self._unchanged({seq_id: revision}))
            self._steps.add(dump)
        return dump

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Replace a sequence by a dump, of this or another backend."""
        return self.restore_parts(seq_id, (data,))

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Like ``restore``, for a dump in parts."""
        with self._call(), failures_of((self._checks.changeable(seq_id),)):
            incoming = Incoming("sequence", parts)
            with incoming.refusals():
                received = self._receiver(seq_id)
                which = range(len(incoming.lengths))
                snapshot = SequenceSnapshot.read(incoming.meta, incoming, which, received.begin)
                incoming.finish()
            self._check_dumped_inputs(snapshot)
            adapters = self._adapters.dumped(snapshot.adapters)
            self._checks.dumped_room(seq_id, snapshot, has_payload=received.fits)
            if received.writer is not None:
                self._exchange(seq_id, snapshot, received.writer, adapters)
            else:
                self._replace(seq_id, snapshot, received.payload(), adapters)
        return Pos(seq_id, len(snapshot.tokens))

    def restore_steps(self, seq_id: int, parts: Iterable[bytes]) -> Iterator[None]:
        """Restore a dump into an empty sequence, about one part a step. Other sequences may change between steps."""
        with self._call():
            if self._ledger.length(self._checks.changeable(seq_id)):
                raise InvalidSequence(f"sequence {seq_id} holds tokens (accepted: an empty sequence)", seq_id=seq_id)
            self._ledger.reserve(seq_id, 0)
            revision = self._ledger.revision(seq_id)
            steps = Steps(self._restoring(seq_id, parts), lambda: self._unchanged({seq_id: revision}, "restore"))
            self._steps.add(steps)
        return steps

    def dump_context(self, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Dump all sequences, in parts. Shared tokens are in the dump once."""
        with self._call():
            check_part_bytes(part_bytes)
            seq_ids = [seq_id for seq_id in range(self.n_seq_max) if self._ledger.length(seq_id)]
            parts = pack_parts("context", *self._context_sections(seq_ids), part_bytes)
            revisions = {seq_id: self._ledger.revision(seq_id) for seq_id in seq_ids}
            dump = Steps(parts, lambda: self._unchanged(revisions))
            self._steps.add(dump)
        return dump

    def restore_context(self, parts: Iterable[bytes]) -> None:
        """Fill the empty context from ``dump_context``."""
        with self._call():
            for seq_id in range(self.n_seq_max):
                if self._ledger.length(self._checks.changeable(seq_id)):
                    raise InvalidSequence(
                        f"sequence {seq_id} holds tokens (accepted: a context that holds none)", seq_id=seq_id
                    )
            before = self._adapters.state()
            try:
                incoming = Incoming("context", parts)
                with incoming.refusals():
                    for share in read_shares(incoming):
                        self._restore_share(share, incoming)
                    incoming.finish()
            except BaseException:
                for seq_id in range(self.n_seq_max):
                    self._drop(seq_id)
                self._adapters.put_back(before)
                raise

    def close(self) -> None:
        """Free the memory now. A second call does nothing."""
        if not self._lock.acquire(blocking=False):
            raise ContextBusy("another thread is inside a call of this context: let it return before close()")
        try:
            if not self._closed:
                self._closed = True
                for steps in self._steps:
                    steps.forget()
                self._writers.clear()
                self._engine_close()
                self._ledger.clear()
                self._adapters.put_back({})
        finally:
            self._lock.release()

    # Checks.

    @contextmanager
    def _call(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise ContextBusy("another thread is inside a call of this context (use one context a thread)")
        try:
            self._check_open()
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _unchanged(self, revisions: Mapping[int, int], what: str = "dump") -> Iterator[None]:
        with self._call():
            for seq_id, revision in revisions.items():
                if self._ledger.revision(seq_id) != revision:
                    raise SequenceChanged(
                        f"sequence {seq_id} was changed since its {what} began: {what} it again", seq_id=seq_id
                    )
            with failures_of(tuple(revisions)):
                yield

    def _check_open(self) -> None:
        if self._closed:
            raise ContextClosed("the context is closed")

    def _check_batch(self, batch: Batch) -> list[int]:
        """Check a batch; returns its sequences, each once. A backend with batches that it cannot run extends this."""
        return self._checks.batch(batch)

    def _check_dumped_inputs(self, snapshot: SequenceSnapshot) -> None:
        """Check the inputs of a dump as ``_check_batch`` checks a batch. A backend extends both or neither."""
        self._checks.dumped_inputs(snapshot)

    # Steps that several calls share.

    def _use_adapters_of(self, seq_id: int) -> None:
        self._adapters.use(seq_id, self._engine_use)

    def _by_adapters(self, batch: Batch, seq_ids: Sequence[int], run: Callable[[Batch], R]) -> R:
        """Run a batch; sequences with different adapters run one after the other."""
        groups = self._adapters.groups(seq_ids)
        if len(groups) == 1:
            self._use_adapters_of(seq_ids[0])
            return run(batch)
        results: list[R] = []
        try:
            for group in groups:
                self._use_adapters_of(group[0])
                results.append(_kept(run(part_of(batch, group))))
        except BaseException:
            if Capability.ENCODER not in self._declared.capabilities:
                for seq_id in (seq_id for group in groups[: len(results)] for seq_id in group):
                    self._use_adapters_of(seq_id)
                    self._engine_take_back(seq_id, self._ledger.length(seq_id))
            raise
        return in_batch_order(batch, groups, results)

    def _append(self, runs: Mapping[int, Sequence[Held]]) -> None:
        for seq_id, run in runs.items():
            self._ledger.append(seq_id, run)

    def _forked_length(self, src: int, end: int | None) -> int:
        """Check a fork; returns its number of tokens."""
        length = self._checks.index(src, self._ledger.length(src) if end is None else end)
        self._checks.whole_blocks(src, length)
        return length

    def _cut(self, seq_id: int, start: int, end: int) -> None:
        self._checks.room(self._ledger.cut_cost(seq_id, start, end), seq_id)
        self._use_adapters_of(seq_id)
        if end == self._ledger.length(seq_id):
            with failures_of((seq_id,)):
                self._engine_truncate(seq_id, start)
            self._ledger.truncate(seq_id, start)
        else:
            with failures_of((seq_id,)):
                self._engine_cut(seq_id, start, end)
            self._ledger.cut(seq_id, start, end)

    def _drop(self, seq_id: int) -> None:
        writer = self._writers.pop(seq_id, None)
        if self._ledger.length(seq_id):
            self._engine_drop(seq_id)
            self._ledger.drop(seq_id)
        elif self._ledger.is_restoring(seq_id):
            if writer is not None:
                writer.undo()
            self._ledger.drop(seq_id)

    def _restoring(self, seq_id: int, parts: Iterable[bytes]) -> Iterator[None]:
        """The steps of a restore. If one fails, the sequence is empty, and nothing is reserved."""
        before = self._adapters.of(seq_id)
        try:
            incoming = Incoming("sequence", parts)
            received = self._reserving_receiver(seq_id)
            try:
                which = range(len(incoming.lengths))
                snapshot = yield from SequenceSnapshot.read_steps(incoming.meta, incoming, which, received.begin)
                incoming.finish()
            except SlmError:
                yield from incoming.refused()
                raise
            self._check_dumped_inputs(snapshot)
            adapters = self._adapters.dumped(snapshot.adapters)
            self._checks.dumped_room(seq_id, snapshot, has_payload=received.fits)
            self._adapters.put(seq_id, adapters)
            self._end_restore(seq_id, snapshot, received)
        except GeneratorExit:  # the iterator is garbage, and the sequence may hold something else by now
            raise
        except BaseException:
            self._drop(seq_id)
            self._adapters.put(seq_id, before)
            raise

    def _receiver(self, seq_id: int) -> Receiver:
        declared, n_free = self._declared, self._checks.replaceable(seq_id)
        return Receiver(
            declared.fits_payload,
            lambda header: header.fingerprint == declared.fingerprint and header.end <= n_free,
            lambda header: self._engine_writer(seq_id, header.end, header.n_bytes),
        )

    def _reserving_receiver(self, seq_id: int) -> Receiver:
        """A receiver that reserves the positions of an empty sequence when the payload begins."""
        declared = self._declared

        def is_used(header: PayloadHeader) -> bool:
            if header.fingerprint != declared.fingerprint:
                return False
            self._checks.room(header.end, seq_id)
            self._ledger.reserve(seq_id, header.end)
            return True

        def new_writer(header: PayloadHeader) -> PayloadWriter | None:
            writer = self._engine_reserving_writer(seq_id, header.end, header.n_bytes)
            if writer is not None:
                self._writers[seq_id] = writer
            return writer

        return Receiver(declared.fits_payload, is_used, new_writer)

    def _end_restore(self, seq_id: int, snapshot: SequenceSnapshot, received: Receiver) -> None:
        """The last step of a restore: the sequence gets its contents. If this raises, it may have a part of them."""
        if received.writer is not None:
            received.writer.put()
            self._ledger.exchange(seq_id, snapshot.held(), snapshot.edits)
            del self._writers[seq_id]
            return
        payload = received.payload()
        if payload:
            self._engine_check_payload(len(snapshot.tokens), payload)
        self._ledger.drop(seq_id)  # the reserved positions are those of the contents
        self._fill(seq_id, snapshot, payload)

    def _context_sections(self, seq_ids: Sequence[int]) -> tuple[dict[str, object], list[bytes | Pieces]]:
        """Metadata and sections of all sequences. A sequence leaves out tokens that it shares with an earlier one."""
        shares: list[object] = []
        sections: list[bytes | Pieces] = []
        for i, seq_id in enumerate(seq_ids):
            start, src = max(((self._ledger.n_shared(seq_id, src), src) for src in seq_ids[:i]), default=(0, 0))
            start, payload = self._tail_payload(seq_id, start)
            snapshot = self._snapshot(seq_id, start)
            of = snapshot.sections(payload)
            shares.append([seq_id, src if start else seq_id, start, len(of), snapshot.meta()])
            sections += of
        return {"sequences": shares}, sections

    def _tail_payload(self, seq_id: int, start: int) -> tuple[int, bytes | Pieces]:
        """How many shared tokens the dump of a sequence leaves out, and the payload of the other tokens."""
        held, edits = self._ledger.inputs(seq_id), self._ledger.edits(seq_id)
        if start == len(held):
            return start, b""
        if Capability.KV_PAYLOAD in self._declared.capabilities and start:
            tail = self._engine_export_tail(seq_id, start)
            if tail is not None:
                return start, tail
        if start and tail_edits(edits, start) is not None and not ahead_of(held[start - 1]):
            return start, b""
        return 0, self._exported(seq_id)

    def _restore_share(self, share: Share, incoming: Incoming) -> None:
        """Fill an empty sequence: fork the shared tokens, then read the next sections of a dump of a context."""
        seq_id, src, start = self._checks.sequence(share.seq_id), share.src, share.start
        if self._ledger.length(seq_id) or start > (self._ledger.length(src) if start else 0):
            raise InvalidSnapshot("the dump's sequences share what is not there")
        n_free = self._ledger.n_free
        received = Receiver(
            self._declared.fits_payload,
            lambda header: header.fingerprint == self._declared.fingerprint and header.end - start <= n_free,
            lambda header: self._share_writer(share, header),
        )
        tail = SequenceSnapshot.read(share.meta, incoming, share.sections, received.begin, start)
        before = self._ledger.inputs(src)[:start] if start else []
        snapshot = tail.after(before)
        self._check_dumped_inputs(snapshot)
        adapters = self._adapters.dumped(snapshot.adapters)
        if start and not are_equal(adapters, self._adapters.of(src)):
            raise InvalidSnapshot("sequences of the dump with different adapters share tokens")
        self._adapters.put(seq_id, adapters)
        self._checks.room(len(tail.tokens), seq_id)
        if received.writer is not None:
            try:
                received.writer.put()
                if start:
                    self._ledger.fork(src, seq_id, start)
                self._ledger.append(seq_id, tail.held())
                self._ledger.set_edits(seq_id, snapshot.edits)
            except BaseException:
                received.writer.undo()
                self._ledger.drop(seq_id)
                raise
        elif start == 0:
            payload = received.payload()
            if payload:
                self._engine_check_payload(len(snapshot.tokens), payload)
            else:
                self._check_replay(seq_id, snapshot.held(), snapshot.edits)
            self._fill(seq_id, snapshot, payload)
        else:
            self._replay_share(share, snapshot)

    def _share_writer(self, share: Share, header: PayloadHeader) -> PayloadWriter | None:
        if share.start == 0:
            return self._engine_writer(share.seq_id, header.end, header.n_bytes)
        return self._engine_tail_writer(share.seq_id, share.src, share.start, header.end, header.n_bytes)

    def _replay_share(self, share: Share, snapshot: SequenceSnapshot) -> None:
        """Fork the shared tokens and decode the others; decode all if they cannot be forked or decoded separately."""
        seq_id, start, held = share.seq_id, share.start, snapshot.held()
        edits = tail_edits(snapshot.edits, start)
        cannot_fork = self.edit_level < EditLevel.TRUNCATE and start < self._ledger.length(share.src)
        if edits is None or cannot_fork or ahead_of(held[start - 1]):
            self._check_replay(seq_id, held, snapshot.edits)
            self._fill(seq_id, snapshot, b"")
            return
        n_copied = self._n_copied_by_fork(share.src, start)
        self._checks.room(self._ledger.fork_cost(start, n_copied), seq_id)
        self._use_adapters_of(seq_id)
        self._engine_fork(share.src, seq_id, start)
        self._ledger.fork(share.src, seq_id, start, n_copied)
        self._check_replay(seq_id, held[start:], edits)
        self._replay_after(seq_id, held[start:], edits)

    def _check_replay(self, seq_id: int, inputs: Sequence[Held], edits: Sequence[Edit]) -> None:
        if edits:
            self._checks.level(EditLevel.CUT)
        self._checks.room(replay_plan(inputs, edits)[1], seq_id)

    def _packed(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """A dump in parts. Each part is made when it is requested."""
        snapshot = self._snapshot(seq_id)
        return pack_parts("sequence", snapshot.meta(), snapshot.sections(self._exported(seq_id)), part_bytes)

    def _exported(self, seq_id: int) -> bytes | Pieces:
        """The payload of a dump; empty without ``KV_PAYLOAD``."""
        has_payload = Capability.KV_PAYLOAD in self._declared.capabilities and self._ledger.length(seq_id) > 0
        return self._engine_export(seq_id) if has_payload else b""

    def _snapshot(self, seq_id: int, start: int = 0) -> SequenceSnapshot:
        """The dump of the inputs from ``start`` on, without the payload."""
        held = self._ledger.inputs(seq_id)[start:]
        return SequenceSnapshot(
            self._declared.backend,
            self._declared.payload_format,
            self._declared.fingerprint,
            tokens=np.array(token_ids(held), np.int32),
            edits=self._ledger.edits(seq_id),
            payload=b"",
            rows=rows_of(held),
            ahead=all_ahead_of(held),
            offsets=offsets_of(held),
            adapters=dumped_scales(self._adapters.of(seq_id)),
        )

    def _exchange(self, seq_id: int, snapshot: SequenceSnapshot, writer: PayloadWriter, adapters: AdapterSet) -> None:
        """Replace a sequence by the contents of a writer."""
        state, adapters_before = self._ledger.state(), self._adapters.of(seq_id)
        try:
            writer.put()
            self._ledger.exchange(seq_id, snapshot.held(), snapshot.edits)
            self._adapters.put(seq_id, adapters)
        except BaseException:
            writer.undo()
            self._ledger.put_back(state)
            self._adapters.put(seq_id, adapters_before)
            raise

    def _replace(self, seq_id: int, snapshot: SequenceSnapshot, payload: bytes, adapters: AdapterSet) -> None:
        """Replace a sequence. If this fails, its old contents are restored from a dump."""
        if payload:
            self._engine_check_payload(len(snapshot.tokens), payload)
        before, exported = self._snapshot(seq_id), whole(self._exported(seq_id))
        adapters_before = self._adapters.of(seq_id)
        try:
            self._drop(seq_id)
            self._adapters.put(seq_id, adapters)
            self._fill(seq_id, snapshot, payload)
        except BaseException:
            self._drop(seq_id)
            self._adapters.put(seq_id, adapters_before)
            self._fill(seq_id, before, exported)
            raise

    def _fill(self, seq_id: int, snapshot: SequenceSnapshot, payload: bytes) -> None:
        """Fill an empty sequence from a payload; without one, decode and cut again."""
        if len(snapshot.tokens) == 0:
            return
        if payload:
            self._engine_import(seq_id, len(snapshot.tokens), payload)
            self._ledger.append(seq_id, snapshot.held())
            self._ledger.set_edits(seq_id, snapshot.edits)
            return
        self._replay_after(seq_id, snapshot.held(), snapshot.edits)

    def _replay_after(self, seq_id: int, inputs: Sequence[Held], edits: Sequence[Edit]) -> None:
        """Decode inputs at the end of a sequence and repeat edits. Positions of the edits count from that end."""
        first = self._ledger.length(seq_id)
        runs, _ = replay_plan(inputs, edits)
        for run, edit in zip(runs, (*edits, None), strict=True):
            self._decode_run(seq_id, run)
            if edit is not None:
                self._cut(seq_id, first + edit.start, first + edit.end)

    def _decode_run(self, seq_id: int, inputs: Sequence[Held]) -> None:
        batch = TokenBatch(self.n_batch)
        self._use_adapters_of(seq_id)
        for chunk in chunks_of(inputs, self.n_batch):
            batch.clear()
            add_held(batch, chunk, Pos(seq_id, self._ledger.length(seq_id)))
            self._engine_decode(batch)
            self._ledger.append(seq_id, chunk)
