"""Keys and values of layers that keep only their sliding window, and a little more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.context.payload import Section
from slm_native.kv.cache import PagedKvCache
from slm_native.kv.plan import BatchPlan, Run, n_pages_of
from slm_native.kv.store import PAGE_TOKENS, HostPageStore, KvLayer, PageLayout
from slm_native.kv.stores import NewStore
from slm_native.kv.tables import Pages, PageTables, page_index

_SLACK = 64  # tokens that can be truncated without decoding again; more than speculation truncates


class Held(NamedTuple):
    """A part of a sequence on pages that no table names yet.

    Attributes:
        gone: pages before the first of them.
        pages: the pages.
    """

    gone: int
    pages: Pages


class WindowCache:
    """A ``PagedKvCache`` whose sequences free pages that have left the window.

    What is held of a sequence of n tokens begins with a whole page, at most ``window - 1`` tokens before n: the next
    token sees those. Where that does not hold for an earlier length, the keys and values before it are computed again
    (``replay``), on pages of their own.

    Args:
        layouts: of a page in each store.
        window: tokens that a token sees, itself included.
        n_batch: tokens of the largest batch.
        n_seq_max: sequences.
        n_replayed: tokens that are computed again at once, at most.
        new_store: makes pages of a layout, so many, where the kernel set computes.

    Raises:
        InvalidOption: the system refuses so much memory.
    """

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        window: int,
        n_batch: int,
        n_seq_max: int,
        n_replayed: int,
        new_store: NewStore = HostPageStore,
    ) -> None:
        self.window = window
        n_pages = self.n_pages_for(window, n_batch, n_seq_max, n_replayed)
        self._cache = PagedKvCache(layouts, n_pages, n_seq_max, new_store)

    @staticmethod
    def n_pages_for(window: int, n_batch: int, n_seq_max: int, n_replayed: int) -> int:
        """Pages that always suffice, however long sequences are.

        Between calls a sequence of n tokens holds the pages from that of token n - window + 1 - 64 on, or fewer: at
        most (window + 189) / 64. A batch adds t / 64 and less than one to each that it brings t tokens for, and copies
        one at most. While tokens are computed again, there is a sequence more, and what is replayed at once.
        """
        each = (window + 3 * PAGE_TOKENS - 3) // PAGE_TOKENS
        in_batch = 2 * n_seq_max + n_pages_of(n_batch)
        in_replay = each + n_pages_of(n_replayed) + 1
        return n_seq_max * each + max(in_batch, in_replay)

    @property
    def by_block(self) -> dict[int, KvLayer]:
        """The cache of each layer, by the block of the model that it is."""
        return self._cache.by_block

    @property
    def n_bytes(self) -> int:
        """Bytes of all pages."""
        return self._cache.n_bytes

    def n_held(self, seq_id: int) -> int:
        """Pages that a sequence holds."""
        return len(self._cache.tables[seq_id])

    def plan(self, seq_ids: NDArray[np.int32], positions: NDArray[np.int32]) -> BatchPlan:
        """See ``PagedKvCache.plan``; positions in runs count from the first page that is held."""
        plan = self._cache.plan(seq_ids, positions)
        tables = plan.tables
        for run in plan.runs:
            gone = tables.gone(run.seq_id)
            length = run.n_held + gone * PAGE_TOKENS
            kept = self._shortened(Held(gone, tables[run.seq_id]), self._first_seen(length) - _SLACK)
            tables = tables.replaced({run.seq_id: kept.pages}, {run.seq_id: kept.gone})
        return replace(plan, tables=tables)

    def commit(self, plan: BatchPlan) -> None:
        """The batch has run: its keys and values count from now on, and pages that left windows are freed."""
        self._cache.commit(plan)

    def held(self, seq_id: int, length: int) -> Held | None:
        """The window of the next token after the first ``length`` of a sequence; None if it is no longer held."""
        tables = self._cache.tables
        gone = tables.gone(seq_id)
        if gone * PAGE_TOKENS > self._first_seen(length):
            return None
        return Held(gone, tables[seq_id][: n_pages_of(length) - gone])

    def replay(self, seq_id: int, before: Held, start: int, stop: int) -> tuple[BatchPlan, Held]:
        """A plan to compute tokens [start, stop) of a sequence again, and what is held of it then.

        Args:
            seq_id: the sequence, whose own pages stay as they are.
            before: what was computed again before; nothing, with the page of ``start`` the first, at the beginning.
            start: the first, on the first slot of a page at the beginning.
            stop: after the last; at most as many as were announced.
        """
        tables, first = self._cache.tables, before.gone * PAGE_TOKENS
        fresh = tables.free(n_pages_of(stop) - before.gone - len(before.pages), before.pages)
        pages = (*before.pages, *fresh)
        positions = np.arange(start, stop)
        run = Run(seq_id, slice(0, stop - start), start - first, stop - first, page_index(pages))
        where = np.array(pages, np.intp)[positions // PAGE_TOKENS - before.gone]
        plan = BatchPlan([run], where, positions % PAGE_TOKENS, tables)
        return plan, self._shortened(Held(before.gone, pages), self._first_seen(stop))

    def put(self, seq_id: int, held: Held) -> None:
        """A sequence holds this, and nothing else."""
        self._cache.put(seq_id, held.pages, held.gone)

    def drop(self, seq_id: int) -> None:
        """Forget a sequence."""
        self.put(seq_id, Held(0, ()))

    def export(self, seq_id: int, length: int) -> Iterator[bytes]:
        """The keys and values that the next token sees, from the beginning of a page on; see ``StoreGroup.export``."""
        gone = self._cache.tables.gone(seq_id)
        positions = np.arange(self.first_exported(length), length) - gone * PAGE_TOKENS
        return self._cache.export_at(seq_id, positions)

    def free(self, length: int) -> Held | None:
        """Pages for what ``export`` gives of a sequence of ``length`` tokens, which no sequence holds; None without."""
        first = self.first_exported(length)
        pages = self._cache.free(length - first)
        return None if pages is None else Held(first // PAGE_TOKENS, pages)

    def sections(self, pages: Pages | None, length: int) -> list[Section]:
        """What takes in what ``export`` gave; see ``PagedKvCache.sections``."""
        return self._cache.sections(pages, length - self.first_exported(length))

    @property
    def tables(self) -> PageTables:
        """Which pages each sequence holds."""
        return self._cache.tables

    def set_tables(self, tables: PageTables) -> None:
        """Every sequence holds what it held when ``tables`` were those of this cache."""
        self._cache.set_tables(tables)

    def first_exported(self, length: int) -> int:
        """The first token of the page that holds the first one that the next token sees."""
        return self._first_seen(length) // PAGE_TOKENS * PAGE_TOKENS

    def _first_seen(self, length: int) -> int:
        return max(0, length - self.window + 1)

    def _shortened(self, held: Held, first: int) -> Held:
        """Without the pages that lie wholly before token ``first``."""
        n = max(0, first // PAGE_TOKENS - held.gone)
        return Held(held.gone + n, held.pages[n:])
