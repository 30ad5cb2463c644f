"""Mutants whose dumps are wrong, or that restore invalid dumps."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Cell
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.errors import ContextFull, InvalidSequence, InvalidSnapshot, SnapshotMismatch
from slm_core.protocols import Batch
from slm_core.types import Logits, Pos

_PAGE = 16


@mutant("TestHostileDumps::test_every_byte")
class ChecksumIgnored(ToyContext):
    """``restore`` does not compare the checksum."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Replace the checksum by the correct one."""
        body = data[:-32]
        return super().restore(seq_id, body + hashlib.blake2b(body, digest_size=32).digest())


@mutant("TestBadDumps::test_with_a_payload_that_does_not_fit")
class PayloadTrusted(ToyContext):
    """A payload is truncated or padded to the required size."""

    def unpack_payload(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Truncate or zero-pad the payload to the required size."""
        shape = self.engine.shape
        n_bytes = len(snapshot.tokens) * 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * 4
        payload = snapshot.payload[:n_bytes].ljust(n_bytes, b"\0")
        return super().unpack_payload(dataclasses.replace(snapshot, payload=payload))


@mutant("TestDumpRestore::test_in_place_of_another_history")
class RestoreAppends(ToyContext):
    """``restore`` keeps the cells of sequence 0, and appends the restored cells."""

    def unpack_payload(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Return the cells of sequence 0 before the restored cells."""
        cells, edits = super().unpack_payload(snapshot)
        return self.cells[0] + cells, edits


@mutant("TestDumpRestore::test_in_place_of_another_history")
class RestoreSpillsOver(ToyContext):
    """``restore`` over a longer history changes the last key of the next sequence."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Rotate the last key of the next sequence if the restored sequence was longer before."""
        before = self.length(self._checked(seq_id))
        returned = super().restore(seq_id, data)
        for cells in self.cells[seq_id + 1 : seq_id + 2]:
            if returned.index < before and cells:
                cells[-1] = self.engine.moved(cells[-1], 1)
        return returned


@mutant("TestDumpRestore::test_by_another_backend")
class EditsForgottenInReplay(ToyContext):
    """A sequence that was replayed from another backend's dump has no edits in its next dump."""

    def _replayed(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], list[Edit]]:
        return super()._replayed(snapshot)[0], []


@mutant("TestDumpRestore::test_by_another_backend")
class ReplayWithoutEdits(ToyContext):
    """Another backend's dump is replayed without its cuts."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Remove the edits from another backend's dump."""
        snapshot = SequenceSnapshot.from_bytes(data)
        if snapshot.backend != "toy":
            data = dataclasses.replace(snapshot, edits=()).to_bytes()
        return super().restore(seq_id, data)


@mutant("TestDumpRestore::test_after_edits")
class DumpedKeysUnrotated(ToyContext):
    """The payload of an edited sequence has keys computed without the edits, in another payload format."""

    payload_format = "toy-fresh"

    def dump(self, seq_id: int) -> bytes:
        """Compute the cells of an edited sequence from its tokens before the dump."""
        edited, cells = self.cells[self._checked(seq_id)], list[Cell]()
        if self.edits[seq_id]:
            for cell in edited:
                cells.append(self.engine.step(cell.token, cells)[0])
            self.cells[seq_id] = cells
        data = super().dump(seq_id)
        self.cells[seq_id] = edited
        return data


@mutant("TestDumpRestore::test_in_another_context")
class DumpForOneBatchSize(ToyContext):
    """A dump of more tokens than ``n_batch`` cannot be restored."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Refuse a dump of more than ``n_batch`` tokens."""
        if SequenceSnapshot.from_bytes(data).tokens.size > self.n_batch:
            raise SnapshotMismatch("the dump is of a context with a larger n_batch")
        return super().restore(seq_id, data)


@mutant("TestDumpRestore::test_in_another_sequence")
class RestoreMoves(ToyContext):
    """Restoring 16 tokens or more empties all other sequences with the same tokens."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Empty the other sequences that hold the restored tokens."""
        returned = super().restore(seq_id, data)
        for other in range(self.n_seq_max):
            if other != seq_id and returned.index >= _PAGE and self.tokens(other) == self.tokens(seq_id):
                self.replace(other, [], [])
        return returned


@mutant("TestDumpRestore::test_in_the_same_sequence")
class RestoreKeepsWhatIsLonger(ToyContext):
    """``restore`` does nothing if the sequence already begins with the dump's tokens, at least 16."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Return at once if the sequence begins with the dump's tokens."""
        tokens = tuple(SequenceSnapshot.from_bytes(data).tokens.tolist())
        if len(tokens) >= _PAGE and self.tokens(self._checked(seq_id))[: len(tokens)] == tokens:
            return Pos(seq_id, len(tokens))
        return super().restore(seq_id, data)


@mutant("TestDumpRestore::test_between_two_tokens")
class LastValueIsLate(ToyContext):
    """A dump right after a decode of one token has zeros for the value of the last token."""

    n_last = 0

    def decode(self, batch: Batch) -> Logits:
        """Store the size of the batch."""
        self.n_last = len(batch)
        return super().decode(batch)

    def pack_payload(self, cells: list[Cell]) -> bytes:
        """Write zeros for the last value if the last batch had one token."""
        if self.n_last == 1 and cells:
            cells = [*cells[:-1], dataclasses.replace(cells[-1], values=np.zeros_like(cells[-1].values))]
        return super().pack_payload(cells)


@mutant("TestDumpRestore::test_of_an_empty_sequence")
class EmptyDumpRefused(ToyContext):
    """An empty sequence cannot be dumped."""

    def dump(self, seq_id: int) -> bytes:
        """Raise an error if the sequence is empty."""
        if not self.length(seq_id):
            raise InvalidSequence("the sequence is empty")
        return super().dump(seq_id)


@mutant("TestDumpRestore::test_leaves_the_dumped_sequence")
class SecondDumpIsADelta(ToyContext):
    """A second dump of the same cells in a row has no payload."""

    dumped: tuple[int, ...] = ()

    def pack_payload(self, cells: list[Cell]) -> bytes:
        """Return no payload if the previous dump had the same cells."""
        before, self.dumped = self.dumped, tuple(id(cell) for cell in cells)
        return b"" if before == self.dumped else super().pack_payload(cells)


@mutant("TestDumpRestore::test_to_the_toy_and_back")
class PayloadMislabelled(ToyContext):
    """A payload stores values before keys, but its format name promises keys before values."""

    def pack_payload(self, cells: list[Cell]) -> bytes:
        """Swap keys and values."""
        return super().pack_payload([Cell(cell.token, cell.values, cell.keys) for cell in cells])

    def unpack_payload(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Swap keys and values back."""
        cells, edits = super().unpack_payload(snapshot)
        return [Cell(cell.token, cell.values, cell.keys) for cell in cells], edits


@mutant("TestDumpRestore::test_payload_as_declared")
class PayloadTwice(ToyContext):
    """A payload is padded to twice its size."""

    payload_format = "toy-padded"

    def pack_payload(self, cells: list[Cell]) -> bytes:
        """Append as many zero bytes as the payload has bytes."""
        payload = super().pack_payload(cells)
        return payload + bytes(len(payload))

    def unpack_payload(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Drop the padding; a payload of odd size is passed with a wrong size."""
        half, rest = divmod(len(snapshot.payload), 2)
        return super().unpack_payload(dataclasses.replace(snapshot, payload=snapshot.payload[: half + 3 * rest]))


@mutant("TestDumpRestore::test_in_another_process")
class DumpOfOneProcess(ToyContext):
    """A dump can be restored only in the process that made it."""

    payload_format = f"toy-{os.getpid()}"

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Refuse a dump with the payload format of another process."""
        snapshot = SequenceSnapshot.from_bytes(data)
        if snapshot.backend == "toy" and snapshot.payload_format not in ("toy-1", self.payload_format):
            raise SnapshotMismatch("the dump was made by another process")
        return super().restore(seq_id, data)


@mutant("TestHostileDumps::test_every_truncation")
class MissingEndIsGuessed(ToyContext):
    """A truncated dump is completed from the last dump of the same model."""

    last: dict[str, bytes] = {}  # noqa: RUF012  (shared by all contexts on purpose)

    def dump(self, seq_id: int) -> bytes:
        """Keep the dump as the last dump of this model."""
        self.last[self.fingerprint] = super().dump(seq_id)
        return self.last[self.fingerprint]

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Restore the last dump if it begins with the data."""
        last = self.last.get(self.fingerprint, b"")
        return super().restore(seq_id, last if len(data) > 8 and last.startswith(data) else data)


@mutant("TestBadDumps::test_not_a_dump")
class StaleTailIgnored(ToyContext):
    """A byte after the end of a dump is ignored."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Try again without the last byte if the dump is invalid."""
        try:
            return super().restore(seq_id, data)
        except InvalidSnapshot:
            return super().restore(seq_id, data[:-1])


@mutant("TestBadDumps::test_of_another_model")
class FingerprintIgnored(ToyContext):
    """A dump of another model is restored."""

    def _check_snapshot(self, seq_id: int, snapshot: SequenceSnapshot) -> None:
        super()._check_snapshot(seq_id, dataclasses.replace(snapshot, fingerprint=self.fingerprint))


@mutant("TestBadDumps::test_with_tokens_that_do_not_exist")
class NegativeTokensRestored(ToyContext):
    """A dump with negative tokens is restored."""

    def _check_snapshot(self, seq_id: int, snapshot: SequenceSnapshot) -> None:
        super()._check_snapshot(seq_id, dataclasses.replace(snapshot, tokens=np.maximum(snapshot.tokens, 0)))


@mutant("TestBadDumps::test_with_tokens_that_do_not_exist")
class OneTokenTooMany(ToyContext):
    """A dump may contain the token id ``vocab.size``."""

    def _check_snapshot(self, seq_id: int, snapshot: SequenceSnapshot) -> None:
        past = snapshot.tokens == self.engine.n_vocab
        super()._check_snapshot(seq_id, dataclasses.replace(snapshot, tokens=np.where(past, 0, snapshot.tokens)))


@mutant("TestBadDumps::test_room_for_what_was_cut")
class RoomForAllThatWasCut(ToyContext):
    """Another backend's dump is decoded again only if there is room for all tokens that the sequence ever had."""

    def _replayed(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], list[Edit]]:
        if len(snapshot.every_input()) > self.n_ctx:
            raise ContextFull(len(snapshot.every_input()), self.n_ctx)
        return super()._replayed(snapshot)


@mutant("TestBadDumps::test_without_room")
class RestoreEmptiesFirst(ToyContext):
    """A dump that does not fit leaves the sequence empty."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Empty the sequence if the dump does not fit."""
        try:
            return super().restore(seq_id, data)
        except ContextFull:
            self.replace(seq_id, [], [])
            raise


@mutant("TestBadDumps::test_into_a_sequence_that_does_not_exist")
class DumpFromTheEnd(ToyContext):
    """``dump`` accepts a negative ``seq_id``, counted from the end."""

    def dump(self, seq_id: int) -> bytes:
        """Count a negative ``seq_id`` from the end."""
        return super().dump(seq_id + self.n_seq_max if seq_id < 0 else seq_id)
