"""Toys whose dumps of whole contexts are wrong."""

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
    """Of the last sequence of a context's dump, the last value is lost."""

    def restore_context(self, parts: Iterable[bytes]) -> None:
        """Lose it where nobody shares it."""
        super().restore_context(parts)
        cells = next((each for each in reversed(self.cells) if each), [])
        if cells and sum(cells[-1] in each for each in self.cells) == 1 and not any(self.edits):
            cells[-1] = dataclasses.replace(cells[-1], values=-cells[-1].values)


@mutant("TestContextDumps::test_shares_again")
class SharedNoMore(ToyContext):
    """The first cell of a sequence that was restored with a context is its own."""

    def restore_context(self, parts: Iterable[bytes]) -> None:
        """Copy it."""
        super().restore_context(parts)
        if not any(self.edits):
            for cells in self.cells:
                cells[:1] = [dataclasses.replace(cell) for cell in cells[:1]]


@mutant("TestContextDumps::test_after_edits")
class ContextsForgetEdits(ToyContext):
    """A context that was restored has no edits."""

    def restore_context(self, parts: Iterable[bytes]) -> None:
        """Forget them."""
        super().restore_context(parts)
        self.edits = [[] for _ in self.edits]


@mutant("TestContextDumps::test_in_parts")
class ContextChangesUnnoticed(ToyContext):
    """The parts of a context's dump go on where a sequence was changed."""

    @contextmanager
    def _all_unchanged(self, cells: list[list[Cell]]) -> Iterator[None]:
        with self._call():
            yield


@mutant("TestContextDumps::test_of_an_empty_context")
class NothingToDump(ToyContext):
    """A context that holds nothing has no dump."""

    def dump_context(self, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
        """Refuse."""
        self._check_open()
        if not any(self.cells):
            raise InvalidSequence("the context is empty")
        return super().dump_context(part_bytes)


@mutant("TestContextDumps::test_refusals")
class HalfAContext(ToyContext):
    """A context's dump without room leaves the sequences that had some."""

    def restore_context(self, parts: Iterable[bytes]) -> None:
        """Keep the first."""
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
