"""Block tables: which pages each sequence holds."""

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

    They never change: a call that changes pages makes new tables and, once it has succeeded, puts them in the place of
    the old ones in one assignment; until then nothing has happened.

    Args:
        n_pages: pages there are.
        tables: the pages of each sequence, in order.
        gone: how many each has given back, before those; None for none.
    """

    def __init__(self, n_pages: int, tables: tuple[Pages, ...], gone: tuple[int, ...] | None = None) -> None:
        self._n_pages = n_pages
        self._tables = tables
        self._gone = gone or (0,) * len(tables)
        self._indices: dict[int, PageIndex] = {}

    @cached_property
    def references(self) -> NDArray[np.intp]:
        """How many sequences hold each page, [n_pages]."""
        held = np.fromiter(itertools.chain.from_iterable(self._tables), np.intp)
        return np.bincount(held, minlength=self._n_pages)

    def __getitem__(self, seq_id: int) -> Pages:
        return self._tables[seq_id]

    def index(self, seq_id: int) -> PageIndex:
        """``page_index`` of a sequence, made once: its pages change with one token in 64."""
        if seq_id not in self._indices:
            self._indices[seq_id] = page_index(self._tables[seq_id])
        return self._indices[seq_id]

    def gone(self, seq_id: int) -> int:
        """The number of pages that a sequence has freed at its start: it holds the later ones."""
        return self._gone[seq_id]

    def is_shared(self, page: int) -> bool:
        """Whether more than one sequence holds a page."""
        return bool(self.references[page] > 1)

    @property
    def n_free(self) -> int:
        """Pages that no sequence holds."""
        return int(np.count_nonzero(self.references == 0))

    def free(self, n: int, besides: Pages = ()) -> list[int]:
        """``n`` pages that no sequence holds: the first, so that a sequence's pages tend to lie side by side.

        Args:
            n: how many.
            besides: pages in use without a sequence.
        """
        unheld = self.references == 0
        unheld[list(besides)] = False
        pages: list[int] = np.flatnonzero(unheld)[:n].tolist()
        assert len(pages) == n, "n_pages_for is not the bound that it claims to be"
        return pages

    def replaced(self, changes: Mapping[int, Pages], gone: Mapping[int, int] | None = None) -> PageTables:
        """Tables in which some sequences hold other pages, and have given back others."""
        if not changes and not gone:
            return self
        tables, before = list(self._tables), list(self._gone)
        for seq_id, pages in changes.items():
            tables[seq_id] = pages
        for seq_id, n in (gone or {}).items():
            before[seq_id] = n
        return PageTables(self._n_pages, tuple(tables), tuple(before))


def page_index(pages: Pages) -> PageIndex:
    """Pages of one sequence, at least one, as stores read them fastest."""
    if pages == tuple(range(pages[0], pages[0] + len(pages))):
        return slice(pages[0], pages[0] + len(pages))
    return np.array(pages, np.intp)
