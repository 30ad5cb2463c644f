"""Toys whose dumps in parts are wrong, or that restore parts which are no dump."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Cell
from slm_core.container import PART_BYTES
from slm_core.context.checks import check_part_bytes
from slm_core.errors import ContextBusy, ContextFull, InvalidSnapshot
from slm_core.protocols import Batch
from slm_core.types import Logits, Pos


class _Watched:
    """Parts that count themselves as open from the first part that was given to the last."""

    def __init__(self, parts: Iterator[bytes], count: Callable[[int], None]) -> None:
        self._parts, self._count, self._is_open = parts, count, False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            part = next(self._parts)
        except StopIteration:
            self._count(-self._is_open)
            self._is_open = False
            raise
        self._count(not self._is_open)
        self._is_open = True
        return part


class _Redirected:
    """The parts of whichever dump is named when one is asked for."""

    def __init__(self, parts: Callable[[], Iterator[bytes]]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return next(self._parts())


@mutant("TestDumpParts::test_are_the_dump")
class PartsAreLarge(ToyContext):
    """A part has room for a checksum besides the bytes that were asked for."""

    def dump_parts(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Ask for more."""
        check_part_bytes(part_bytes)
        return super().dump_parts(seq_id, min(part_bytes + 32, PART_BYTES))


@mutant("TestDumpParts::test_sizes_and_sequences_that_do_not_exist")
class PartsFromTheEnd(ToyContext):
    """Negative sequences are dumped in parts, counted from the end."""

    def dump_parts(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Count."""
        return super().dump_parts(seq_id + self.n_seq_max if seq_id < 0 else seq_id, part_bytes)


@mutant("TestDumpParts::test_others_go_on_between_parts")
class BusyBetweenParts(ToyContext):
    """No other sequence is decoded while a dump in parts is not finished."""

    n_open = 0

    def dump_parts(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Count it."""

        def count(n: int) -> None:
            self.n_open += n

        return _Watched(super().dump_parts(seq_id, part_bytes), count)

    def decode(self, batch: Batch) -> Logits:
        """Wait for dumps of which some parts were given."""
        if self.n_open and 0 not in batch.seq_ids:
            raise ContextBusy("the context is dumped in parts")
        return super().decode(batch)


@mutant("TestDumpParts::test_two_at_once")
class OneDumpAtATime(ToyContext):
    """A dump in parts gives those of the dump that was begun last."""

    last: Iterator[bytes]

    def dump_parts(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Begin another."""
        self.last = super().dump_parts(seq_id, part_bytes)
        return _Redirected(lambda: self.last)


@mutant("TestDumpParts::test_of_a_sequence_that_changes")
class ChangesUnnoticed(ToyContext):
    """The parts of a dump go on where the sequence was changed between them."""

    @contextmanager
    def _unchanged(self, seq_id: int, cells: list[Cell]) -> Iterator[None]:
        with self._call():
            yield


@mutant("TestDumpParts::test_of_a_context_that_is_closed")
class PartsAfterClose(ToyContext):
    """The parts of a dump go on after ``close``."""

    @contextmanager
    def _unchanged(self, seq_id: int, cells: list[Cell]) -> Iterator[None]:
        if self.closed:
            yield
            return
        with super()._unchanged(seq_id, cells):
            yield


@mutant("TestDumpParts::test_given_up")
class OpenDumpsTakeRoom(ToyContext):
    """A dump in parts takes a position until its last part was given."""

    n_open = 0

    @property
    def n_free(self) -> int:
        """Without those of open dumps."""
        return super().n_free - self.n_open

    def dump_parts(self, seq_id: int, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Take one."""

        def count(n: int) -> None:
            self.n_open += n

        return _Watched(super().dump_parts(seq_id, part_bytes), count)


@mutant("TestRestoreParts::test_of_any_size")
class EmptyPartEndsTheDump(ToyContext):
    """An empty part is taken for the end."""

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Stop there, unless nothing came before."""
        given = list(parts)
        return super().restore_parts(seq_id, itertools.takewhile(len, given) if given and given[0] else given)


@mutant("TestRestoreParts::test_from_a_context")
class RestoredPartsHaveNoEdits(ToyContext):
    """What was restored in parts has no edits when it is dumped again."""

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Forget them."""
        place = super().restore_parts(seq_id, parts)
        self.edits[seq_id] = []
        return place


@mutant("TestRestoreParts::test_over_what_a_sequence_holds")
class PartsNeedRoomForBoth(ToyContext):
    """A dump in parts needs room besides what the sequence holds."""

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Count both, where the sequence holds more than is restored."""
        before = self.cells[seq_id]
        place = super().restore_parts(seq_id, parts)
        if len(before) > place.index and self.n_free < len(before):
            self.cells[seq_id] = before
            raise ContextFull(place.index, self.n_free)
        return place


@mutant("TestRestoreParts::test_that_are_not_a_dump")
class PartsSorted(ToyContext):
    """Parts in another order are put right."""

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Try them the other way round."""
        given = list(parts)
        try:
            return super().restore_parts(seq_id, given)
        except InvalidSnapshot:
            return super().restore_parts(seq_id, [*given[:1], *given[:0:-1]])


@mutant("TestRestoreParts::test_without_room")
class PartsWithoutRoomEmpty(ToyContext):
    """A dump in parts that does not fit leaves the sequence empty."""

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Empty it."""
        try:
            return super().restore_parts(seq_id, parts)
        except ContextFull:
            self.replace(seq_id, [], [])
            raise


@mutant("TestRestoreParts::test_that_cannot_be_read")
class LostPartsEmptyTheSequence(ToyContext):
    """The sequence is emptied before the second part comes."""

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Make room for what comes; what is refused puts it back."""
        before, came = (self.cells[seq_id], self.edits[seq_id]), []
        for part in parts:
            came.append(part)
            self.replace(seq_id, [], [])
        self.replace(seq_id, *before)
        return super().restore_parts(seq_id, came)
