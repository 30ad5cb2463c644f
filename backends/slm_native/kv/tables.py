"""Page tables: the pages of each sequence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from slm_native.kv.store import PageIndex

Pages = tuple[int, ...]


class PageTables:
    """The pages of every sequence.

    Tables are immutable. A call that changes pages makes new tables and assigns them once it has succeeded; until then
    nothing has changed.

    Args:
        n_pages: number of pages.
        tables: the pages of each sequence, in order.
        gone: the number of pages that each sequence has freed at its start; None for none.
    """

    def __init__(self, n_pages: int, tables: tuple[Pages, ...], gone: tuple[int, ...] | None = None) -> None:
        self._n_pages = n_pages
        self._tables = tables
        self._gone = gone or (0,) * len(tables)
        self._indices: dict[int, PageIndex] = {}

    @cached_property
    def references(self) -> NDArray[np.intp]:
        """The number of sequences that hold each page, [n_pages]."""
        pages = np.fromiter(itertools.chain.from_iterable(self._tables), np.intp)
        return np.bincount(pages, minlength=self._n_pages)

    def __getitem__(self, seq_id: int) -> Pages:
        return self._tables[seq_id]

    def index(self, seq_id: int) -> PageIndex:
        """``page_index`` of a sequence, cached: its pages change with one token in 64 only."""
        if seq_id not in self._indices:
            self._indices[seq_id] = page_index(self._tables[seq_id])
        return self._indices[seq_id]

    def gone(self, seq_id: int) -> int:
        """The number of pages that a sequence has freed at its start."""
        return self._gone[seq_id]

    def is_shared(self, page: int) -> bool:
        """Whether more than one sequence holds a page."""
        return bool(self.references[page] > 1)

    @property
    def n_free(self) -> int:
        """The number of pages that no sequence holds."""
        return int(np.count_nonzero(self.references == 0))

    def free(self, n: int, besides: Pages = ()) -> list[int]:
        """``n`` pages that no sequence holds; the lowest, so that the pages of a sequence are often contiguous.

        Args:
            n: number of pages.
            besides: pages in use that no table contains.
        """
        unheld = self.references == 0
        unheld[list(besides)] = False
        pages: list[int] = np.flatnonzero(unheld)[:n].tolist()
        assert len(pages) == n, "n_pages_for is not the bound that it claims to be"
        return pages

    def replaced(self, changes: Mapping[int, Pages], gone: Mapping[int, int] | None = None) -> PageTables:
        """Tables with other pages for some sequences, or with other numbers of pages freed at their start."""
        if not changes and not gone:
            return self
        tables, before = list(self._tables), list(self._gone)
        for seq_id, pages in changes.items():
            tables[seq_id] = pages
        for seq_id, n in (gone or {}).items():
            before[seq_id] = n
        return PageTables(self._n_pages, tuple(tables), tuple(before))


def page_index(pages: Pages) -> PageIndex:
    """The pages of one sequence (at least one) as the fastest index: a slice if they are contiguous."""
    if pages == tuple(range(pages[0], pages[0] + len(pages))):
        return slice(pages[0], pages[0] + len(pages))
    return np.array(pages, np.intp)
