"""Toys whose dumps are wrong, or that restore what is no dump."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from slm_conformance.faults.registry import fault
from slm_conformance.toy_context import ToyContext
from slm_conformance.toy_engine import Cell
from slm_core.snapshot import Edit, SequenceSnapshot
from slm_core.types import Pos


@fault("TestBadDumps::test_changed")
class ChecksumIgnored(ToyContext):
    """``restore`` takes bytes whose checksum does not match."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Correct the checksum."""
        body = data[:-32]
        return super().restore(seq_id, body + hashlib.blake2b(body, digest_size=32).digest())


@fault("TestBadDumps::test_with_a_payload_that_does_not_fit")
class PayloadTrusted(ToyContext):
    """A payload is cut or filled to the size that is wanted."""

    def unpacked(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Make it fit."""
        shape = self.engine.shape
        n_bytes = len(snapshot.tokens) * 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * 4
        payload = snapshot.payload[:n_bytes].ljust(n_bytes, b"\0")
        return super().unpacked(dataclasses.replace(snapshot, payload=payload))


@fault("TestDumpRestore::test_in_place_of_another_history")
class RestoreAppends(ToyContext):
    """``restore`` appends to what the sequence holds."""

    def unpacked(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Keep the old cells."""
        cells, edits = super().unpacked(snapshot)
        return self.cells[0] + cells, edits


@fault("TestDumpRestore::test_by_another_backend")
class ReplayWithoutEdits(ToyContext):
    """Another backend's dump is replayed without its cuts."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Forget the edits."""
        snapshot = SequenceSnapshot.from_bytes(data)
        if snapshot.backend != "toy":
            data = dataclasses.replace(snapshot, edits=()).to_bytes()
        return super().restore(seq_id, data)


@fault("TestDumpRestore::test_after_edits")
class DumpedKeysUnrotated(ToyContext):
    """A dump of an edited sequence holds keys as if there had been no edit."""

    def dump(self, seq_id: int) -> bytes:
        """Decode anew for the dump."""
        edited, cells = self.cells[seq_id], list[Cell]()
        if self.edits[seq_id]:
            for cell in edited:
                cells.append(self.engine.step(cell.token, cells)[0])
            self.cells[seq_id] = cells
        data = super().dump(seq_id)
        self.cells[seq_id] = edited
        return data
