"""The base class of contexts: dumps and their replay, over ``core.ContextCore``.

A backend derives from ``ContextBase`` and writes the ``_engine_*`` methods. Their arguments are checked, and there is
room for the result. If a method raises, it has to leave the engine as it was; then the context is unchanged, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from slm_core.adapters import AdapterSet
from slm_core.container import PART_BYTES, Incoming, Pieces, pack_parts
from slm_core.context import picture
from slm_core.context.batch import TokenBatch
from slm_core.context.checks import check_part_bytes, failures_of
from slm_core.context.core import ContextCore
from slm_core.context.inputs import (
    Held,
    add_held,
    ahead_of,
    all_ahead_of,
    biases_of,
    chunks_of,
    offsets_of,
    rows_of,
    token_ids,
)
from slm_core.context.ledger import replay_plan, tail_edits
from slm_core.context.payload import PayloadWriter, Receiver, Steps, whole
from slm_core.context.sequence_adapters import are_equal, dumped_scales
from slm_core.context.snapshot import Edit, PayloadHeader, SequenceSnapshot, Share, read_shares
from slm_core.errors import InvalidSequence, InvalidSnapshot, SequenceChanged, SlmError
from slm_core.types import Capability, EditLevel, Pos


class ContextBase(ContextCore):
    """A context with dumps. ``protocols.Context`` documents the calls.

    For the arguments see ``ContextCore``.
    """

    def __repr__(self) -> str:
        return picture.line(self, None if self._closed else self._ledger.lengths())

    def _repr_html_(self) -> str:
        if self._closed:
            return picture.page(self, None, None)
        return picture.page(self, self._ledger.lengths(), self._ledger.references())

    def dump(self, seq_id: int) -> bytes:
        """Dump a sequence."""
        with self._call():
            seq_id = self._checks.sequence(seq_id)
            with failures_of((seq_id,)):
                return b"".join(self._packed(seq_id))

    def dump_parts(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """The bytes of ``dump`` in parts. Other sequences may change between parts."""
        with self._call():
            check_part_bytes(part_bytes)
            seq_id = self._checks.sequence(seq_id)
            with failures_of((seq_id,)):
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
        with self._call():
            seq_id = self._checks.changeable(seq_id)
            with failures_of((seq_id,)):
                return self._restored(seq_id, parts)

    def _restored(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        incoming = Incoming("sequence", parts)
        with incoming.refusals():
            received = self._receiver(seq_id)
            section_indices = range(len(incoming.lengths))
            snapshot = SequenceSnapshot.read(incoming.meta, incoming, section_indices, received.begin)
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
            seq_id = self._checks.changeable(seq_id)
            if self._ledger.length(seq_id):
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
                        f"sequence {seq_id} holds tokens (accepted: a context without tokens)", seq_id=seq_id
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

    # Checks.

    @contextmanager
    def _unchanged(self, revisions: Mapping[int, int], operation: str = "dump") -> Iterator[None]:
        with self._call():
            for seq_id, revision in revisions.items():
                if self._ledger.revision(seq_id) != revision:
                    raise SequenceChanged(
                        f"sequence {seq_id} was changed since its {operation} began: {operation} it again",
                        seq_id=seq_id,
                    )
            with failures_of(tuple(revisions)):
                yield

    def _check_dumped_inputs(self, snapshot: SequenceSnapshot) -> None:
        """Check the inputs of a dump as ``_check_batch`` checks a batch. A backend extends both or neither."""
        self._checks.dumped_inputs(snapshot)

    # Steps that several calls share.

    def _restoring(self, seq_id: int, parts: Iterable[bytes]) -> Iterator[None]:
        """The steps of a restore. If one fails, the sequence is empty, and nothing is reserved."""
        before = self._adapters.of(seq_id)
        try:
            incoming = Incoming("sequence", parts)
            received = self._reserving_receiver(seq_id)
            try:
                section_indices = range(len(incoming.lengths))
                snapshot = yield from SequenceSnapshot.read_steps(
                    incoming.meta, incoming, section_indices, received.begin
                )
                incoming.finish()
            except SlmError:
                yield from incoming.refused()
                raise
            self._check_dumped_inputs(snapshot)
            adapters = self._adapters.dumped(snapshot.adapters)
            self._checks.dumped_room(seq_id, snapshot, has_payload=received.fits)
            self._adapters.put(seq_id, adapters)
            self._end_restore(seq_id, snapshot, received)
        except GeneratorExit:  # the iterator was abandoned, and the sequence may have other contents by now
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
        """The last step of a restore: the sequence gets its contents. If this raises, a part may be in the sequence."""
        if received.writer is not None:
            received.writer.put()
            self._ledger.exchange(seq_id, snapshot.held(), snapshot.edits)
            del self._writers[seq_id]
            return
        payload = received.payload()
        if payload:
            self._engine_check_payload(len(snapshot.tokens), payload)
        self._ledger.drop(seq_id)  # the contents need the reserved positions
        self._fill(seq_id, snapshot, payload)

    def _context_sections(self, seq_ids: Sequence[int]) -> tuple[dict[str, object], list[bytes | Pieces]]:
        """Metadata and sections of all sequences. A sequence leaves out tokens that it shares with an earlier one."""
        shares: list[object] = []
        sections: list[bytes | Pieces] = []
        for i, seq_id in enumerate(seq_ids):
            start, src = max(((self._ledger.n_shared(seq_id, src), src) for src in seq_ids[:i]), default=(0, 0))
            start, payload = self._tail_payload(seq_id, start)
            snapshot = self._snapshot(seq_id, start)
            sequence_sections = snapshot.sections(payload)
            shares.append([seq_id, src if start else seq_id, start, len(sequence_sections), snapshot.meta()])
            sections += sequence_sections
        return {"sequences": shares}, sections

    def _tail_payload(self, seq_id: int, start: int) -> tuple[int, bytes | Pieces]:
        """The number of shared tokens that the dump of a sequence leaves out, and the payload of its other tokens."""
        inputs, edits = self._ledger.inputs(seq_id), self._ledger.edits(seq_id)
        if start == len(inputs):
            return start, b""
        if Capability.KV_PAYLOAD in self._declared.capabilities and start:
            tail = self._engine_export_tail(seq_id, start)
            if tail is not None:
                return start, tail
        if start and tail_edits(edits, start) is not None and not ahead_of(inputs[start - 1]):
            return start, b""
        return 0, self._exported(seq_id)

    def _restore_share(self, share: Share, incoming: Incoming) -> None:
        """Fill an empty sequence: fork the shared tokens, then read the next sections of a dump of a context."""
        seq_id, src, start = self._checks.sequence(share.seq_id), share.src, share.start
        if self._ledger.length(seq_id) or start > (self._ledger.length(src) if start else 0):
            raise InvalidSnapshot("the dump's sequences share tokens that the dump lacks")
        n_free = self._ledger.n_free
        received = Receiver(
            self._declared.fits_payload,
            lambda header: header.fingerprint == self._declared.fingerprint and header.end - start <= n_free,
            lambda header: self._share_writer(share, header),
        )
        tail = SequenceSnapshot.read(share.meta, incoming, share.sections, received.begin, start)
        shared_inputs = self._ledger.inputs(src)[:start] if start else []
        snapshot = tail.after(shared_inputs)
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
        seq_id, start, inputs = share.seq_id, share.start, snapshot.held()
        edits = tail_edits(snapshot.edits, start)
        cannot_fork = self.edit_level < EditLevel.TRUNCATE and start < self._ledger.length(share.src)
        if edits is None or cannot_fork or ahead_of(inputs[start - 1]):
            self._check_replay(seq_id, inputs, snapshot.edits)
            self._fill(seq_id, snapshot, b"")
            return
        n_copied = self._n_copied_by_fork(share.src, start)
        self._checks.room(self._ledger.fork_cost(start, n_copied), seq_id)
        self._use_adapters_of(seq_id)
        self._engine_fork(share.src, seq_id, start)
        self._ledger.fork(share.src, seq_id, start, n_copied)
        self._check_replay(seq_id, inputs[start:], edits)
        self._replay_after(seq_id, inputs[start:], edits)

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
        inputs = self._ledger.inputs(seq_id)[start:]
        return SequenceSnapshot(
            self._declared.backend,
            self._declared.payload_format,
            self._declared.fingerprint,
            tokens=np.array(token_ids(inputs), np.int32),
            edits=self._ledger.edits(seq_id),
            payload=b"",
            rows=rows_of(inputs),
            ahead=all_ahead_of(inputs),
            offsets=offsets_of(inputs),
            bias=biases_of(inputs),
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
        """Decode inputs after a sequence and repeat their edits. Positions of the edits count from the old end."""
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
