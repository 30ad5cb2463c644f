"""Toys whose dumps are wrong, or that restore what is no dump."""

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
        """Correct the checksum."""
        body = data[:-32]
        return super().restore(seq_id, body + hashlib.blake2b(body, digest_size=32).digest())


@mutant("TestBadDumps::test_with_a_payload_that_does_not_fit")
class PayloadTrusted(ToyContext):
    """A payload is truncated or padded to the required size."""

    def unpacked(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Make it fit."""
        shape = self.engine.shape
        n_bytes = len(snapshot.tokens) * 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * 4
        payload = snapshot.payload[:n_bytes].ljust(n_bytes, b"\0")
        return super().unpacked(dataclasses.replace(snapshot, payload=payload))


@mutant("TestDumpRestore::test_in_place_of_another_history")
class RestoreAppends(ToyContext):
    """``restore`` appends to the tokens of the sequence."""

    def unpacked(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Keep the old cells."""
        cells, edits = super().unpacked(snapshot)
        return self.cells[0] + cells, edits


@mutant("TestDumpRestore::test_in_place_of_another_history")
class RestoreSpillsOver(ToyContext):
    """``restore`` over a longer history changes the last key of the next sequence."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Change it."""
        before = self.length(self._checked(seq_id))
        place = super().restore(seq_id, data)
        for cells in self.cells[seq_id + 1 : seq_id + 2]:
            if place.index < before and cells:
                cells[-1] = self.engine.moved(cells[-1], 1)
        return place


@mutant("TestDumpRestore::test_by_another_backend")
class EditsForgottenInReplay(ToyContext):
    """A sequence that was replayed from another backend's dump has no edits in its next dump."""

    def _replayed(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], list[Edit]]:
        return super()._replayed(snapshot)[0], []


@mutant("TestDumpRestore::test_by_another_backend")
class ReplayWithoutEdits(ToyContext):
    """Another backend's dump is replayed without its cuts."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Forget the edits."""
        snapshot = SequenceSnapshot.from_bytes(data)
        if snapshot.backend != "toy":
            data = dataclasses.replace(snapshot, edits=()).to_bytes()
        return super().restore(seq_id, data)


@mutant("TestDumpRestore::test_after_edits")
class DumpedKeysUnrotated(ToyContext):
    """The payload of an edited sequence has keys without the edits, in another payload format."""

    payload_format = "toy-fresh"

    def dump(self, seq_id: int) -> bytes:
        """Decode anew for the dump."""
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
        """Refuse it."""
        if SequenceSnapshot.from_bytes(data).tokens.size > self.n_batch:
            raise SnapshotMismatch("the dump is of a context with a larger n_batch")
        return super().restore(seq_id, data)


@mutant("TestDumpRestore::test_in_another_sequence")
class RestoreMoves(ToyContext):
    """Restoring a page of tokens or more into another sequence empties the dumped one."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Empty the one that holds the same."""
        place = super().restore(seq_id, data)
        for other in range(self.n_seq_max):
            if other != seq_id and place.index >= _PAGE and self.tokens(other) == self.tokens(seq_id):
                self.replace(other, [], [])
        return place


@mutant("TestDumpRestore::test_in_the_same_sequence")
class RestoreKeepsWhatIsLonger(ToyContext):
    """``restore`` over a continuation of the dump does nothing if a page or more is the same."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Look at the tokens alone."""
        tokens = tuple(SequenceSnapshot.from_bytes(data).tokens.tolist())
        if len(tokens) >= _PAGE and self.tokens(self._checked(seq_id))[: len(tokens)] == tokens:
            return Pos(seq_id, len(tokens))
        return super().restore(seq_id, data)


@mutant("TestDumpRestore::test_between_two_tokens")
class LastValueIsLate(ToyContext):
    """A dump right after the decode of one token lacks this token's value."""

    n_last = 0

    def decode(self, batch: Batch) -> Logits:
        """Remember."""
        self.n_last = len(batch)
        return super().decode(batch)

    def packed(self, cells: list[Cell]) -> bytes:
        """Leave it out."""
        if self.n_last == 1 and cells:
            cells = [*cells[:-1], dataclasses.replace(cells[-1], values=np.zeros_like(cells[-1].values))]
        return super().packed(cells)


@mutant("TestDumpRestore::test_of_an_empty_sequence")
class EmptyDumpRefused(ToyContext):
    """An empty sequence cannot be dumped."""

    def dump(self, seq_id: int) -> bytes:
        """Refuse."""
        if not self.length(seq_id):
            raise InvalidSequence("the sequence is empty")
        return super().dump(seq_id)


@mutant("TestDumpRestore::test_leaves_the_dumped_sequence")
class SecondDumpIsADelta(ToyContext):
    """A second dump of the same cells has no payload."""

    dumped: tuple[int, ...] = ()

    def packed(self, cells: list[Cell]) -> bytes:
        """Leave out what was dumped."""
        before, self.dumped = self.dumped, tuple(id(cell) for cell in cells)
        return b"" if before == self.dumped else super().packed(cells)


@mutant("TestDumpRestore::test_to_the_toy_and_back")
class PayloadMislabelled(ToyContext):
    """A payload has values before keys, but the name of the format with keys before values."""

    def packed(self, cells: list[Cell]) -> bytes:
        """Swap."""
        return super().packed([Cell(cell.token, cell.values, cell.keys) for cell in cells])

    def unpacked(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Swap again."""
        cells, edits = super().unpacked(snapshot)
        return [Cell(cell.token, cell.values, cell.keys) for cell in cells], edits


@mutant("TestDumpRestore::test_payload_as_declared")
class PayloadTwice(ToyContext):
    """A payload has room for twice the tokens."""

    payload_format = "toy-padded"

    def packed(self, cells: list[Cell]) -> bytes:
        """Pad."""
        payload = super().packed(cells)
        return payload + bytes(len(payload))

    def unpacked(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Check the size, then take the padding off."""
        half, rest = divmod(len(snapshot.payload), 2)
        return super().unpacked(dataclasses.replace(snapshot, payload=snapshot.payload[: half + 3 * rest]))


@mutant("TestDumpRestore::test_in_another_process")
class DumpOfOneProcess(ToyContext):
    """A dump is restored only in the process that made it."""

    payload_format = f"toy-{os.getpid()}"

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Refuse another process's."""
        snapshot = SequenceSnapshot.from_bytes(data)
        if snapshot.backend == "toy" and snapshot.payload_format not in ("toy-1", self.payload_format):
            raise SnapshotMismatch("the dump was made by another process")
        return super().restore(seq_id, data)


@mutant("TestHostileDumps::test_every_truncation")
class MissingEndIsGuessed(ToyContext):
    """A truncated dump is completed from the dump made last."""

    last: dict[str, bytes] = {}  # noqa: RUF012  (shared by all contexts on purpose)

    def dump(self, seq_id: int) -> bytes:
        """Keep it."""
        self.last[self.fingerprint] = super().dump(seq_id)
        return self.last[self.fingerprint]

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Complete it."""
        last = self.last.get(self.fingerprint, b"")
        return super().restore(seq_id, last if len(data) > 8 and last.startswith(data) else data)


@mutant("TestBadDumps::test_not_a_dump")
class StaleTailIgnored(ToyContext):
    """A byte after the end of a dump is ignored."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Try again without it."""
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


@mutant("TestBadDumps::test_without_room")
class RestoreEmptiesFirst(ToyContext):
    """A dump that does not fit leaves the sequence empty."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Empty it."""
        try:
            return super().restore(seq_id, data)
        except ContextFull:
            self.replace(seq_id, [], [])
            raise


@mutant("TestBadDumps::test_into_a_sequence_that_does_not_exist")
class DumpFromTheEnd(ToyContext):
    """A negative ``seq_id`` counts from the end."""

    def dump(self, seq_id: int) -> bytes:
        """Count."""
        return super().dump(seq_id + self.n_seq_max if seq_id < 0 else seq_id)
