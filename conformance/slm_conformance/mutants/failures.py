"""Toys that are wrong where calls fail half-way, contexts are many or long, or memory is looked at."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.backend import ToyModel
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Array, Cell, Step
from slm_core.context.inputs import batch_inputs
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.errors import ContextFull
from slm_core.protocols import Batch, Context
from slm_core.types import ContextOptions, Logits, Pos


@mutant("TestFailures::test_a_batch_that_cannot_be_read")
class RowsAskedLast(ToyContext):
    """``logits_mask`` is read from the batch after the sequence has its tokens."""

    def _ran(self, batch: Batch, step: Step, width: int) -> Array:
        rows = super()._ran(batch, step, width)
        return rows[: np.count_nonzero(batch.logits_mask)]


@mutant("TestFailures::test_an_interrupted_decode")
class TokensBeforeTheirTurn(ToyContext):
    """A sequence holds each token as soon as it has run, even if the batch fails later."""

    def _ran(self, batch: Batch, step: Step, width: int) -> Array:
        if batch.ahead.any():
            return super()._ran(batch, step, width)
        mask, rows = batch.logits_mask.copy(), np.empty((len(batch), width), np.float32)
        inputs = batch_inputs(batch)
        for i, (token, seq_id) in enumerate(zip(inputs, batch.seq_ids.tolist(), strict=True)):
            cell, rows[i] = step(token, self.cells[seq_id])
            self.cells[seq_id].append(cell)
        return rows[mask]


@mutant("TestFailures::test_an_interrupted_restore")
class RestoresInPlace(ToyContext):
    """``restore`` empties the sequence after the checks, and an interrupt leaves it empty."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Of all that may be raised, look after errors alone."""
        self._check_open()
        self._check_snapshot(self._checked(seq_id), SequenceSnapshot.from_bytes(data))
        before, self.cells[seq_id] = self.cells[seq_id], []
        try:
            return super().restore(seq_id, data)
        except Exception:
            self.cells[seq_id] = before
            raise


@mutant("TestFailures::test_an_interrupted_restore_over_a_fork")
class MadeAnewWhereThereIsRoom(ToyContext):
    """``restore`` empties the sequence, and after an interrupt copies its cells back, which takes positions."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Copy in place of sharing again."""
        self._check_open()
        before = self.cells[self._checked(seq_id)]
        self.cells[seq_id] = []
        try:
            return super().restore(seq_id, data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and len(before) > self.n_free:
                raise ContextFull(len(before), self.n_free) from None
            self.cells[seq_id] = before
            raise


@mutant("TestBadDumps::test_without_room_over_a_fork")
class SharedCellsCountedAsFree(ToyContext):
    """All positions of a sequence count as free when a dump replaces it, including shared ones."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Count shared cells as further room."""
        others = {id(cell) for i, cells in enumerate(self.cells) if i != seq_id for cell in cells}
        n_shared = sum(id(cell) in others for cell in self.cells[self._checked(seq_id)])
        self.n_ctx += n_shared
        try:
            return super().restore(seq_id, data)
        finally:
            self.n_ctx -= n_shared


@mutant("TestDecode::test_rows_stay_while_other_contexts_decode")
class RowsInOneBuffer(ToyModel):
    """All contexts of a model return rows in the same memory."""

    def new_context(self, options: ContextOptions) -> Context:
        """Give each the model's buffer."""
        context = super().new_context(options)
        assert isinstance(context, ToyContext)
        shared, decode, lock = self.__dict__.setdefault("rows", {}), context.decode, threading.get_ident()

        def decode_into(batch: Batch) -> Logits:
            rows = decode(batch)
            if threading.get_ident() != lock:
                return rows
            kept: Logits = shared.setdefault(rows.shape, np.empty_like(rows))
            kept[:] = rows
            return kept

        context.decode = decode_into  # type: ignore[method-assign]
        return context


@mutant("TestDecodeLimits::test_many_sequences")
class TheNinthIsWrong(ToyContext):
    """From the ninth sequence on, rows are those of the sequence before."""

    def decode(self, batch: Batch) -> Logits:
        """Exchange them."""
        which = np.flatnonzero(batch.seq_ids[batch.logits_mask] >= 8)
        rows = super().decode(batch)
        if len(which) > 1:
            rows[which] = rows[np.roll(which, 1)]
        return rows


@mutant("TestDecodeLimits::test_long_sequences")
class PositionsEndAt400(ToyContext):
    """A sequence holds at most 400 tokens, for any ``n_ctx``."""

    def _check_batch(self, batch: Batch) -> None:
        super()._check_batch(batch)
        if batch.positions.max(initial=0) >= 400:
            raise ContextFull(1, 0)


@mutant("TestDecodeLimits::test_long_sequences")
class SharingForgotten(ToyContext):
    """If more than 256 positions are in use, shared positions count once per sequence."""

    @property
    def n_free(self) -> int:
        """Without what is shared."""
        n = sum(map(len, self.cells))
        return self.n_ctx - n if n > 256 and len(self.cells) < 8 else super().n_free


@mutant("TestClose::test_closed_contexts_hold_nothing")
class CellsOfTheClosed(ToyContext):
    """A closed context keeps its cells while it is referenced."""

    def close(self) -> None:
        """Keep them."""
        kept = self.cells
        super().close()
        self.kept = kept if any(kept) else getattr(self, "kept", [])


@mutant("TestFork::test_shared_storage_takes_no_memory")
class CountedAsShared(ToyContext):
    """Forks are copies, but count as shared storage."""

    def forked(self, cells: list[Cell]) -> list[Cell]:
        """Copy keys and values, too."""
        copies = self.__dict__.setdefault("copies", [])
        copies.append([(cell.keys.copy(), cell.values.copy()) for cell in cells])
        return cells


@mutant("TestBadDumps::test_with_numbers_that_are_none")
class FirstNumbersChecked(ToyContext):
    """Only the first numbers of a payload are checked."""

    def unpacked(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Let the others pass."""
        shape, n = self.engine.shape, len(snapshot.tokens)
        dims = (n, 2, shape.n_layers, shape.n_kv_heads, shape.head_dim)
        if len(snapshot.payload) != 4 * int(np.prod(dims)):
            return super().unpacked(snapshot)
        kept = np.frombuffer(snapshot.payload, np.float32).reshape(dims)
        if not np.isfinite(kept[: n // 8]).all():
            return super().unpacked(snapshot)
        return [Cell(token, *kept[i]) for i, token in enumerate(snapshot.held())], snapshot.edits
