"""The paged KV cache of a context.

The context's ledger keeps the lengths of sequences and passes them with each call. Slots of a page after the last token
are never read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from slm_core.context.payload import Section
from slm_native.kv.plan import BatchPlan, Run, count, n_pages_of, rows_by_sequence
from slm_native.kv.store import PAGE_TOKENS, HostPageStore, KvLayer, PageLayout
from slm_native.kv.stores import NewStore, Rotate, StoreGroup, in_model_order
from slm_native.kv.tables import Pages, PageTables, page_index


class PagedKvCache:
    """Keys and values of several sequences.

    Layers with the same shape of heads share a store. A page has the same number in every store.

    Args:
        layouts: the page layout of each store.
        n_pages: pages for sequences; see ``n_pages_for``.
        n_seq_max: number of sequences.
        new_store: allocates the pages of a layout on the kernel set's device.
        n_replayed: the largest number of tokens of one ``replay``.

    Raises:
        InvalidOption: the system refuses to allocate the memory.
    """

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        n_pages: int,
        n_seq_max: int,
        new_store: NewStore = HostPageStore,
        n_replayed: int = 0,
    ) -> None:
        # Scratch pages for a replay; one more, because its tokens may begin in the middle of a page.
        n_scratch = n_pages_of(n_replayed) + 1 if n_replayed else 0
        self._stores = StoreGroup(layouts, n_pages + n_scratch, new_store)
        self._scratch = n_pages
        self._tables = PageTables(n_pages, ((),) * n_seq_max)

    @staticmethod
    def n_pages_for(n_ctx: int, n_seq_max: int) -> int:
        """The number of pages that always suffices for ``n_ctx`` tokens, however sequences share and cut them.

        The ledger shares single tokens, this cache shares whole pages. Two sequences that share a prefix of c tokens in
        the ledger share at least c // 64 pages here, because a write copies only the page of the first change. Let
        sequence i share at most c_i tokens with earlier sequences, and add d_i tokens. The sum of all d_i is at most
        n_ctx. Sequence i adds at most ceil((c_i + d_i) / 64) - c_i // 64 <= (d_i + 126) / 64 pages. While a batch runs,
        a page that all of its sequences copy is still held: at most one page per two sequences. So n_ctx / 64 +
        (126 / 64 + 1 / 2) * n_seq_max pages suffice.
        """
        return -(-n_ctx // PAGE_TOKENS) + 3 * n_seq_max

    @property
    def layers(self) -> Sequence[KvLayer]:
        """The cache of each layer, in the order of the model."""
        return in_model_order(self.by_block)

    @property
    def by_block(self) -> dict[int, KvLayer]:
        """The cache of each layer, by block number."""
        return self._stores.by_block

    @property
    def tables(self) -> PageTables:
        """The pages of each sequence."""
        return self._tables

    def plan(self, seq_ids: NDArray[np.int32], positions: NDArray[np.int32]) -> BatchPlan:
        """Assign pages and slots to the tokens of a batch; shared pages are copied before they are written.

        Args:
            seq_ids: the sequence of each token [T].
            positions: the position of each token [T]; ascending and without gaps within a sequence.
        """
        tokens = [(seq_id, rows, int(positions[rows][0])) for seq_id, rows in rows_by_sequence(seq_ids)]
        tables = self._extended([(seq_id, start, start + count(rows)) for seq_id, rows, start in tokens])
        runs = []
        pages = np.empty(len(seq_ids), np.intp)
        for seq_id, rows, start in tokens:
            index, gone = tables.index(seq_id), tables.gone(seq_id)
            which = positions[rows] // PAGE_TOKENS - gone
            pages[rows] = index.start + which if isinstance(index, slice) else index[which]
            first = start - gone * PAGE_TOKENS
            runs.append(Run(seq_id, rows, first, first + count(rows), index))
        return BatchPlan(runs, pages, (positions % PAGE_TOKENS).astype(np.intp), tables)

    def replay(self, seq_id: int, start: int, stop: int) -> BatchPlan:
        """A plan for tokens [start, stop) that a sequence already contains; at most ``n_replayed`` tokens.

        They attend to earlier positions, and their keys and values go to scratch pages.
        """
        pages = self._tables[seq_id][: n_pages_of(stop)]
        positions = np.arange(start, stop)
        scratch = self._scratch + positions // PAGE_TOKENS - start // PAGE_TOKENS
        run = Run(seq_id, slice(0, stop - start), start, stop, page_index(pages))
        return BatchPlan([run], scratch, positions % PAGE_TOKENS, self._tables)

    def commit(self, plan: BatchPlan) -> None:
        """Make the batch's keys and values current, after it has run."""
        self._tables = plan.tables

    def fork(self, src: int, dst: int, end: int) -> None:
        """Let the empty ``dst`` share the pages of ``src[:end]``."""
        self._tables = self._tables.replaced({dst: self._tables[src][: n_pages_of(end)]})

    def truncate(self, seq_id: int, length: int) -> None:
        """Drop all but the first ``length`` tokens."""
        self._tables = self._tables.replaced({seq_id: self._tables[seq_id][: n_pages_of(length)]})

    def cut(self, seq_id: int, start: int, end: int, length: int, rotate: Rotate) -> None:
        """Remove [start, end) from a sequence of ``length`` tokens, and move the later tokens down.

        Keys that are not in f32 are dequantized, rotated and quantized again. The new content is computed first and
        then written at once: to the sequence's exclusive pages, and to free pages in place of shared ones.

        Args:
            seq_id: the sequence.
            start: first token to remove.
            end: end of the removed tokens.
            length: length of the sequence, more than ``end``.
            rotate: rotates float32 keys [n, L, K, D] of L blocks by a number of positions.
        """
        first = start // PAGE_TOKENS
        pages = self._tables[seq_id][: n_pages_of(length)]
        n_kept = start - first * PAGE_TOKENS  # tokens before the cut on its first page
        positions = np.concatenate([np.arange(start - n_kept, start), np.arange(end, length)])
        unshared = [page for page in pages[first:] if not self._tables.is_shared(page)]
        n_needed = n_pages_of(len(positions))
        target = (unshared + self._tables.free(max(0, n_needed - len(unshared))))[:n_needed]
        self._stores.put(target, self._stores.without(pages, positions, n_kept, start - end, rotate))
        self._tables = self._tables.replaced({seq_id: (*pages[:first], *target)})

    def drop(self, seq_id: int) -> None:
        """Drop the pages of a sequence."""
        self._tables = self._tables.replaced({seq_id: ()})

    def export(self, seq_id: int, length: int, start: int = 0) -> Iterator[bytes]:
        """Keys and values of a sequence, in pieces: the planes [length - start, L, K, W] of keys, then of values."""
        return self._stores.export(self._tables[seq_id], np.arange(start, length))

    def free(self, length: int) -> Pages | None:
        """Free pages for ``length`` tokens; None if there are too few."""
        n = n_pages_of(length)
        return tuple(self._tables.free(n)) if n <= self._tables.n_free else None

    def continued(self, src: int, start: int, length: int) -> Pages:
        """Pages for a sequence that shares the first ``start`` tokens of ``src``; a page shared in part is copied."""
        kept = self._tables[src][: start // PAGE_TOKENS]
        fresh = self._tables.free(n_pages_of(length) - len(kept))
        if start % PAGE_TOKENS:
            self._stores.copy([self._tables[src][len(kept)]], fresh[:1])
        return (*kept, *fresh)

    def sections(self, pages: Pages | None, length: int, start: int = 0) -> list[Section]:
        """The sections of a payload of ``export``, which write to free ``pages``; without pages they only check."""
        return self._stores.sections(pages, np.arange(start, length))

    def set_tables(self, tables: PageTables) -> None:
        """Restore earlier page tables."""
        self._tables = tables

    def put(self, seq_id: int, pages: Pages, gone: int) -> None:
        """Replace the pages of a sequence; it has freed the ``gone`` pages before them."""
        self._tables = self._tables.replaced({seq_id: pages}, {seq_id: gone})

    def export_at(self, seq_id: int, positions: NDArray[np.intp]) -> Iterator[bytes]:
        """Like ``export``, for tokens at some positions on a sequence's pages."""
        return self._stores.export(self._tables[seq_id], positions)

    @property
    def n_bytes(self) -> int:
        """Bytes of all pages."""
        return self._stores.n_bytes

    def _extended(self, extensions: Sequence[tuple[int, int, int]]) -> PageTables:
        """Page tables that have room for tokens [start, stop) of some sequences, after [0, start)."""
        old = self._tables
        kept: dict[int, Pages] = {}
        copied: dict[int, int] = {}  # the last page of a sequence, if it must be copied
        n_new: dict[int, int] = {}
        for seq_id, start, stop in extensions:
            gone = old.gone(seq_id)
            pages = old[seq_id][: n_pages_of(start) - gone]
            if start % PAGE_TOKENS and old.is_shared(pages[-1]):
                copied[seq_id] = pages[-1]
                pages = pages[:-1]
            kept[seq_id], n_new[seq_id] = pages, n_pages_of(stop) - gone - len(pages)
        fresh = iter(old.free(sum(n_new.values())) if any(n_new.values()) else ())
        changes = {seq_id: (*pages, *(next(fresh) for _ in range(n_new[seq_id]))) for seq_id, pages in kept.items()}
        targets = [changes[seq_id][len(kept[seq_id])] for seq_id in copied]
        self._stores.copy(list(copied.values()), targets)
        return old.replaced({seq_id: pages for seq_id, pages in changes.items() if pages != old[seq_id]})
