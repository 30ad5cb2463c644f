"""Keys and values of layers that keep only their sliding window, plus some slack."""

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
    """Pages of a sequence that are in no page table yet.

    Attributes:
        gone: number of pages before the first of them.
        pages: the pages.
    """

    gone: int
    pages: Pages


class WindowCache:
    """A ``PagedKvCache`` whose sequences free pages that have left the window.

    A sequence of n tokens holds at least the pages of its last ``window - 1`` tokens, to which the next token attends.
    If the pages do not reach far enough back for an earlier length, ``replay`` computes the missing ones again, on
    separate pages.

    Args:
        layouts: the page layout of each store.
        window: number of tokens that a token attends to, itself included.
        n_batch: tokens of the largest batch.
        n_seq_max: number of sequences.
        n_replayed: the largest number of tokens of one ``replay``.
        new_store: allocates the pages of a layout on the kernel set's device.

    Raises:
        InvalidOption: the system refuses to allocate the memory.
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
        """The number of pages that always suffices, for any length of sequences.

        Between calls a sequence of n tokens holds at most the pages from token n - window + 1 - 64 on, that is
        (window + 189) / 64 pages. For t new tokens of a sequence, a batch adds less than t / 64 + 1 pages and copies at
        most one. A replay needs the pages of one more sequence, plus the pages of its tokens.
        """
        per_sequence = (window + 3 * PAGE_TOKENS - 3) // PAGE_TOKENS
        in_batch = 2 * n_seq_max + n_pages_of(n_batch)
        in_replay = per_sequence + n_pages_of(n_replayed) + 1
        return n_seq_max * per_sequence + max(in_batch, in_replay)

    @property
    def by_block(self) -> dict[int, KvLayer]:
        """The cache of each layer, by block number."""
        return self._cache.by_block

    @property
    def n_bytes(self) -> int:
        """Bytes of all pages."""
        return self._cache.n_bytes

    def n_held(self, seq_id: int) -> int:
        """The number of pages that a sequence holds."""
        return len(self._cache.tables[seq_id])

    def plan(self, seq_ids: NDArray[np.int32], positions: NDArray[np.int32]) -> BatchPlan:
        """See ``PagedKvCache.plan``; positions in runs count from the first held page."""
        plan = self._cache.plan(seq_ids, positions)
        tables = plan.tables
        for run in plan.runs:
            gone = tables.gone(run.seq_id)
            length = run.n_held + gone * PAGE_TOKENS
            kept = self._shortened(Held(gone, tables[run.seq_id]), self._first_seen(length) - _SLACK)
            tables = tables.replaced({run.seq_id: kept.pages}, {run.seq_id: kept.gone})
        return replace(plan, tables=tables)

    def commit(self, plan: BatchPlan) -> None:
        """Make the batch's keys and values current, after it has run; pages that left the window are freed."""
        self._cache.commit(plan)

    def held(self, seq_id: int, length: int) -> Held | None:
        """The pages of the window after the first ``length`` tokens; None if some are already freed."""
        tables = self._cache.tables
        gone = tables.gone(seq_id)
        if gone * PAGE_TOKENS > self._first_seen(length):
            return None
        return Held(gone, tables[seq_id][: n_pages_of(length) - gone])

    def replay(self, seq_id: int, before: Held, start: int, stop: int) -> tuple[BatchPlan, Held]:
        """Plan a replay of tokens [start, stop) of a sequence. Also returns the pages of the window after the replay.

        Args:
            seq_id: the sequence; its pages in the table do not change.
            before: pages from the previous replay; at first no pages, and ``gone`` is the page of ``start``.
            start: first token; in the first replay, on the first slot of a page.
            stop: end of the tokens; at most ``n_replayed`` after ``start``.
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
        """Replace the pages of a sequence."""
        self._cache.put(seq_id, held.pages, held.gone)

    def drop(self, seq_id: int) -> None:
        """Drop the pages of a sequence."""
        self.put(seq_id, Held(0, ()))

    def export(self, seq_id: int, length: int) -> Iterator[bytes]:
        """Keys and values from the first page of the window on; see ``StoreGroup.export``."""
        gone = self._cache.tables.gone(seq_id)
        positions = np.arange(self.first_exported(length), length) - gone * PAGE_TOKENS
        return self._cache.export_at(seq_id, positions)

    def free(self, length: int) -> Held | None:
        """Free pages for the result of ``export`` of a sequence of ``length`` tokens; None if there are too few."""
        first = self.first_exported(length)
        pages = self._cache.free(length - first)
        return None if pages is None else Held(first // PAGE_TOKENS, pages)

    def sections(self, pages: Pages | None, length: int) -> list[Section]:
        """The sections of a payload of ``export``; see ``PagedKvCache.sections``."""
        return self._cache.sections(pages, length - self.first_exported(length))

    @property
    def tables(self) -> PageTables:
        """The pages of each sequence."""
        return self._cache.tables

    def set_tables(self, tables: PageTables) -> None:
        """Restore earlier page tables."""
        self._cache.set_tables(tables)

    def first_exported(self, length: int) -> int:
        """The first token on the first page of the next token's window."""
        return self._first_seen(length) // PAGE_TOKENS * PAGE_TOKENS

    def _first_seen(self, length: int) -> int:
        return max(0, length - self.window + 1)

    def _shortened(self, held: Held, first: int) -> Held:
        """``held`` without the pages that lie wholly before token ``first``."""
        n = max(0, first // PAGE_TOKENS - held.gone)
        return Held(held.gone + n, held.pages[n:])
