"""Mutants whose dumps of whole contexts are wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from slm_conformance.mutants.registry import mutant
from slm_conformance.toy.context import ToyContext
from slm_conformance.toy.engine import Cell
from slm_core.container import PART_BYTES
from slm_core.errors import InvalidSequence, SlmError


@mutant("TestContextDumps::test_goes_on")
class ValuesOfTheLastAreLost(ToyContext):
    """A restored context has the last value of its last sequence with the wrong sign."""

    def restore_context(self, parts: Iterable[bytes]) -> None:
        """Negate the last value, unless it is shared or a sequence has edits."""
        super().restore_context(parts)
        cells = next((each for each in reversed(self.cells) if each), [])
        if cells and sum(cells[-1] in each for each in self.cells) == 1 and not any(self.edits):
            cells[-1] = dataclasses.replace(cells[-1], values=-cells[-1].values)


@mutant("TestContextDumps::test_shares_again")
class SharedNoMore(ToyContext):
    """Sequences of a restored context do not share their first cell."""

    def restore_context(self, parts: Iterable[bytes]) -> None:
        """Copy the first cell of each sequence, unless a sequence has edits."""
        super().restore_context(parts)
        if not any(self.edits):
            for cells in self.cells:
                cells[:1] = [dataclasses.replace(cell) for cell in cells[:1]]


@mutant("TestContextDumps::test_after_edits")
class ContextsForgetEdits(ToyContext):
    """A restored context has no edits."""

    def restore_context(self, parts: Iterable[bytes]) -> None:
        """Remove all edits after the restore."""
        super().restore_context(parts)
        self.edits = [[] for _ in self.edits]


@mutant("TestContextDumps::test_by_another_backend")
class LastOfAnotherBackendIsWrong(ToyContext):
    """After a replay of another backend's dump of a context, the last value has the wrong sign."""

    def restore_context(self, parts: Iterable[bytes]) -> None:
        """Negate the last value of the last sequence of a dump without adapters that has another backend's name."""
        data = b"".join(parts)
        super().restore_context([data])
        if b"stranger" in data and not any(self.sets):
            cells = next((each for each in reversed(self.cells) if each), [])
            cells[-1:] = [dataclasses.replace(cell, values=-cell.values) for cell in cells[-1:]]


@mutant("TestContextDumps::test_in_parts")
class ContextChangesUnnoticed(ToyContext):
    """The dump of a context in parts continues after a sequence was changed."""

    @contextmanager
    def _all_unchanged(self, cells: list[list[Cell]]) -> Iterator[None]:
        with self._call():
            yield


@mutant("TestContextDumps::test_of_an_empty_context")
class NothingToDump(ToyContext):
    """An empty context cannot be dumped."""

    def dump_context(self, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Raise an error if the context is empty."""
        self._check_open()
        if not any(self.cells):
            raise InvalidSequence("the context is empty")
        return super().dump_context(part_bytes)


@mutant("TestContextDumps::test_refusals")
class HalfAContext(ToyContext):
    """If a context's dump does not fit, its first sequence is restored."""

    def restore_context(self, parts: Iterable[bytes]) -> None:
        """Restore only the first sequence if the dump is refused."""
        data = b"".join(parts)
        try:
            super().restore_context([data])
        except SlmError:
            n_ctx, self.n_ctx = self.n_ctx, 2**20
            try:
                if not any(self.cells):
                    super().restore_context([data])
                    self.cells[1:] = [[] for _ in self.cells[1:]]
            finally:
                self.n_ctx = n_ctx
            raise
