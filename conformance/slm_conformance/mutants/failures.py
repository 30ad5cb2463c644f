"""Mutants that fail when calls are interrupted, contexts are many or long, or memory is measured."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.backend import ToyModel
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Array, Cell, Run
from slm_core.context.inputs import Held, batch_inputs
from slm_core.context.snapshot import Edit, SequenceSnapshot
from slm_core.errors import ContextFull, DecodeFailed
from slm_core.protocols import Batch, Context
from slm_core.types import ContextOptions, Logits, Pos


class _BrokenOff(ToyContext):
    """An interrupt breaks off some calls, which is right only before anything has changed."""

    _breaks_off = False

    @contextmanager
    def _call(self, *, closing: bool = False) -> Iterator[None]:
        if not self._breaks_off:
            with super()._call(closing=closing):
                yield
            return
        with self.alone():
            self._check_open()
            yield

    @contextmanager
    def _broken_off(self) -> Iterator[None]:
        """Calls in this block can be broken off."""
        self._breaks_off = True
        try:
            yield
        finally:
            self._breaks_off = False


@mutant("TestFailures::test_a_batch_that_cannot_be_read")
class RowsAskedLast(ToyContext):
    """``logits_mask`` is read from the batch after its tokens were added to the sequence."""

    def _run_batch(self, batch: Batch, run: Run, width: int) -> Array:
        rows = super()._run_batch(batch, run, width)
        return rows[: np.count_nonzero(batch.logits_mask)]


@mutant("TestFailures::test_numbers_that_are_not_finite")
class NotANumberStays(ToyContext):
    """A batch with NaN in its rows raises, but its tokens stay in their sequences."""

    def _run_batch(self, batch: Batch, run: Run, width: int) -> Array:
        cells = [list(held) for held in self.cells]
        grown: dict[int, list[Cell]] = {}

        def kept(inputs: Sequence[Held], past: Sequence[Cell]) -> tuple[list[Cell], Array]:
            new_cells, rows = run(inputs, past)
            grown.setdefault(len(grown), [*past, *new_cells])
            return new_cells, rows

        try:
            return super()._run_batch(batch, kept, width)
        except DecodeFailed:
            for seq_id, held in zip(dict.fromkeys(batch.seq_ids.tolist()), grown.values(), strict=True):
                cells[seq_id] = held
            self.cells = cells
            raise


@mutant("TestFailures::test_numbers_that_are_not_finite")
class NotANumberReturned(ToyContext):
    """Rows of logits with NaN are returned."""

    def decode(self, batch: Batch) -> Logits:
        """Decode, and return NaN for all rows if the numbers are not finite."""
        try:
            return super().decode(batch)
        except DecodeFailed:
            return np.full((np.count_nonzero(batch.logits_mask), self.engine.n_vocab), np.nan, np.float32)


@mutant("TestFailures::test_numbers_that_are_not_finite")
class NotANumberSpreads(ToyContext):
    """After a batch whose numbers are not finite, rows of all sequences have NaN until the next ``clear``."""

    def _run_batch(self, batch: Batch, run: Run, width: int) -> Array:
        try:
            rows = super()._run_batch(batch, run, width)
        except DecodeFailed:
            self.__dict__["spoiled"] = True
            raise
        return rows + np.float32(np.nan) if self.__dict__.get("spoiled") else rows

    def clear(self) -> None:
        """Forget the broken numbers."""
        super().clear()
        self.__dict__["spoiled"] = False


@mutant("TestFailures::test_an_interrupted_decode")
class TokensBeforeTheirTurn(_BrokenOff):
    """A sequence keeps each token as soon as it has run, even if the batch fails later."""

    def decode(self, batch: Batch) -> Logits:
        """Decode, unless an interrupt comes."""
        with self._broken_off():
            return super().decode(batch)

    def _run_batch(self, batch: Batch, run: Run, width: int) -> Array:
        if batch.ahead.any() or any(self.sets):
            return super()._run_batch(batch, run, width)
        mask, rows = batch.logits_mask.copy(), np.empty((len(batch), width), np.float32)
        inputs = batch_inputs(batch)
        for i, (token, seq_id) in enumerate(zip(inputs, batch.seq_ids.tolist(), strict=True)):
            cells, rows[i : i + 1] = run([token], self.cells[seq_id])
            self.cells[seq_id] = self.cells[seq_id] + cells
        return rows[mask]


@mutant("TestFailures::test_an_interrupted_truncate")
class TruncatesTokenByToken(_BrokenOff):
    """``truncate`` removes one token after the other, and an interrupt leaves some."""

    def truncate(self, pos: Pos) -> Pos:
        """Truncate in steps."""
        is_valid = pos.seq_id in range(self.n_seq_max) and pos.index >= 0
        with self._broken_off():
            for end in range(len(self.cells[pos.seq_id]) - 1, pos.index, -1) if is_valid else ():
                super().truncate(Pos(pos.seq_id, end))
            return super().truncate(pos)


@mutant("TestFailures::test_an_interrupted_cut")
class KeysMoveOneByOne(_BrokenOff):
    """``cut`` moves keys one by one if there is one sequence, and an interrupt leaves some of them moved."""

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Cut, unless an interrupt comes."""
        with self._broken_off():
            return super().cut(start, end)

    def cut_cells(self, cells: list[Cell], edits: list[Edit], first: int, last: int) -> tuple[list[Cell], list[Edit]]:
        """Move the keys of the cells that the sequence still has."""
        new_cells, new_edits = super().cut_cells(cells, edits, first, last)
        n_sequences = sum(len(held) > 0 for held in self.cells)
        for i in range(first, len(new_cells) if n_sequences == 1 else first):
            cells[last - first + i] = self._moved(new_cells[i])
        return new_cells, new_edits

    def _moved(self, cell: Cell) -> Cell:
        return cell


@mutant("TestFailures::test_an_interrupted_fork")
class ForksTokenByToken(_BrokenOff):
    """``fork`` fills the copy token by token, and an interrupt leaves a part of it."""

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Add one cell after the other."""
        with self._broken_off():
            pos = super().fork(src, dst, end)
            cells, self.cells[dst] = self.cells[dst], []
            for cell in cells:
                self._add(dst, cell)
            return pos

    def _add(self, dst: int, cell: Cell) -> None:
        self.cells[dst].append(cell)


@mutant("TestFailures::test_an_interrupted_drop")
class LosesInterrupts(_BrokenOff):
    """An interrupt during ``drop`` is lost."""

    def drop(self, seq_id: int) -> None:
        """Drop again after an interrupt."""
        try:
            with self._broken_off():
                super().drop(seq_id)
        except KeyboardInterrupt:
            super().drop(seq_id)


@mutant("TestFailures::test_an_interrupted_restore")
class RestoresInPlace(_BrokenOff):
    """``restore`` empties a sequence that shares nothing after the checks, and an interrupt leaves it empty."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Put the old cells back after errors, but not after an interrupt."""
        self._check_open()
        self._check_snapshot(self._checked(seq_id), SequenceSnapshot.from_bytes(data))
        others = {id(cell) for i, cells in enumerate(self.cells) if i != seq_id for cell in cells}
        if any(id(cell) in others for cell in self.cells[seq_id]):
            return super().restore(seq_id, data)
        before, self.cells[seq_id] = self.cells[seq_id], []
        try:
            with self._broken_off():
                return super().restore(seq_id, data)
        except Exception:
            self.cells[seq_id] = before
            raise


@mutant("TestFailures::test_an_interrupted_restore_over_a_fork")
class MadeAnewWhereThereIsRoom(_BrokenOff):
    """After an interrupt, ``restore`` puts the old cells back only if there are free positions for all of them."""

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Raise ``ContextFull`` after an interrupt if copies of the old cells would not fit."""
        self._check_open()
        before = self.cells[self._checked(seq_id)]
        self.cells[seq_id] = []
        try:
            with self._broken_off():
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
        """Add the number of shared cells to ``n_ctx`` during the restore."""
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
        """Make a context that returns its rows in a buffer of the model."""
        context = super().new_context(options)
        assert isinstance(context, ToyContext)
        shared, decode, lock = self.__dict__.setdefault("rows", {}), context.decode, threading.get_ident()

        def decode_into(batch: Batch) -> Logits:
            rows = decode(batch)
            if threading.get_ident() != lock:
                return rows
            buffer: Logits = shared.setdefault(rows.shape, np.empty_like(rows))
            buffer[:] = rows
            return buffer

        context.decode = decode_into  # type: ignore[method-assign]
        return context


@mutant("TestDecodeLimits::test_many_sequences")
class TheNinthIsWrong(ToyContext):
    """Rows of the ninth and later sequences are returned in the wrong order."""

    def decode(self, batch: Batch) -> Logits:
        """Shift the rows of the ninth and later sequences by one."""
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
        """The number of free positions if shared positions count once per sequence."""
        n = sum(map(len, self.cells))
        return self.n_ctx - n if n > 256 and len(self.cells) < 8 else super().n_free


@mutant("TestClose::test_closed_contexts_hold_nothing", volume=0.25)
class CellsOfTheClosed(ToyContext):
    """A closed context keeps its cells while it is referenced."""

    def close(self) -> None:
        """Put the cells back after the close."""
        cells = self.cells
        super().close()
        self.cells = cells if any(cells) else getattr(self, "kept", [])


@mutant("TestFork::test_shared_storage_takes_no_memory")
class CountedAsShared(ToyContext):
    """A fork copies keys and values, but counts as shared storage."""

    def fork_cells(self, cells: list[Cell]) -> list[Cell]:
        """Store copies of keys and values besides the shared cells."""
        copies = self.__dict__.setdefault("copies", [])
        copies.append([(cell.keys.copy(), cell.values.copy()) for cell in cells])
        return cells


@mutant("TestBadDumps::test_with_numbers_that_are_none")
class HugeNumbersPass(ToyContext):
    """A payload with finite numbers is loaded, however large they are."""

    def unpack_payload(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Replace numbers that are too large."""
        numbers = np.frombuffer(snapshot.payload[: len(snapshot.payload) // 4 * 4], np.float32)
        if len(snapshot.payload) % 4 or not np.isfinite(numbers).all():
            return super().unpack_payload(snapshot)
        bounded = np.clip(numbers, -1e12, 1e12).astype(np.float32)
        return super().unpack_payload(dataclasses.replace(snapshot, payload=bounded.tobytes()))


@mutant("TestBadDumps::test_with_numbers_that_are_none")
class FirstNumbersChecked(ToyContext):
    """Only the first eighth of a payload is checked for numbers that are not finite."""

    def unpack_payload(self, snapshot: SequenceSnapshot) -> tuple[list[Cell], Sequence[Edit]]:
        """Skip the check if the first eighth is finite."""
        shape, n = self.engine.shape, len(snapshot.tokens)
        dims = (n, 2, shape.n_layers, shape.n_kv_heads, shape.head_dim)
        if len(snapshot.payload) != 4 * int(np.prod(dims)):
            return super().unpack_payload(snapshot)
        keys_and_values = np.frombuffer(snapshot.payload, np.float32).reshape(dims)
        if not np.isfinite(keys_and_values[: n // 8]).all():
            return super().unpack_payload(snapshot)
        return [Cell(token, *keys_and_values[i]) for i, token in enumerate(snapshot.held())], snapshot.edits
