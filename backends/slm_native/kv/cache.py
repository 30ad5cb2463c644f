"""The paged KV cache of a context.

It keeps no lengths: the context's ledger does, and says with each call how many tokens a sequence holds. What is on a
page behind the last token is never read.
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

    Layers whose heads are alike have a store together; a page is the same number in each.

    Args:
        layouts: of a page in each store.
        n_pages: how many there are for sequences; see ``n_pages_for``.
        n_seq_max: sequences.
        new_store: makes pages of a layout, so many, where the kernel set computes.
        n_replayed: the most tokens that ``replay`` is asked for at once.

    Raises:
        InvalidOption: the system refuses so much memory.
    """

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        n_pages: int,
        n_seq_max: int,
        new_store: NewStore = HostPageStore,
        n_replayed: int = 0,
    ) -> None:
        # Pages that no sequence ever holds, and one more, as tokens may begin in the middle of a page.
        n_scratch = n_pages_of(n_replayed) + 1 if n_replayed else 0
        self._stores = StoreGroup(layouts, n_pages + n_scratch, new_store)
        self._scratch = n_pages
        self._tables = PageTables(n_pages, ((),) * n_seq_max)

    @staticmethod
    def n_pages_for(n_ctx: int, n_seq_max: int) -> int:
        """Pages with which ``n_ctx`` tokens always fit, however they are shared and wherever pages are cut.

        The ledger shares single tokens, this cache whole pages. Two sequences share a prefix of c tokens in the
        ledger and at least c // 64 pages here, as only the page of the first change is ever copied. Number the
        sequences; of all that it shares with earlier ones, sequence i shares c_i tokens at most and adds d_i, the sum
        of which is at most n_ctx. It adds at most ceil((c_i + d_i) / 64) - c_i // 64 <= (d_i + 126) / 64 pages. While a
        batch runs, a page that is copied by all who share it is still held: one for two sequences at most. So
        n_ctx / 64 + (126 / 64 + 1 / 2) * n_seq_max pages suffice.
        """
        return -(-n_ctx // PAGE_TOKENS) + 3 * n_seq_max

    @property
    def layers(self) -> Sequence[KvLayer]:
        """The cache of each layer, in the order of the model."""
        return in_model_order(self.by_block)

    @property
    def by_block(self) -> dict[int, KvLayer]:
        """The cache of each layer, by the block of the model that it is."""
        return self._stores.by_block

    @property
    def tables(self) -> PageTables:
        """Which pages each sequence holds."""
        return self._tables

    def plan(self, seq_ids: NDArray[np.int32], positions: NDArray[np.int32]) -> BatchPlan:
        """Find a place for the tokens of a batch; pages that others hold, too, are copied before they are written.

        Args:
            seq_ids: the sequence of each token [T].
            positions: the position of each [T], per sequence in order and without gaps.
        """
        spans = [(seq_id, rows, int(positions[rows][0])) for seq_id, rows in rows_by_sequence(seq_ids)]
        tables = self._extended([(seq_id, start, start + count(rows)) for seq_id, rows, start in spans])
        runs = []
        pages = np.empty(len(seq_ids), np.intp)
        for seq_id, rows, start in spans:
            held, gone = tables.index(seq_id), tables.gone(seq_id)
            which = positions[rows] // PAGE_TOKENS - gone
            pages[rows] = held.start + which if isinstance(held, slice) else held[which]
            first = start - gone * PAGE_TOKENS
            runs.append(Run(seq_id, rows, first, first + count(rows), held))
        return BatchPlan(runs, pages, (positions % PAGE_TOKENS).astype(np.intp), tables)

    def replay(self, seq_id: int, start: int, stop: int) -> BatchPlan:
        """A plan for tokens [start, stop) that a sequence holds already, at most as many as were announced.

        They attend to earlier positions, and their keys and values go to scratch pages.
        """
        pages = self._tables[seq_id][: n_pages_of(stop)]
        positions = np.arange(start, stop)
        scratch = self._scratch + positions // PAGE_TOKENS - start // PAGE_TOKENS
        run = Run(seq_id, slice(0, stop - start), start, stop, page_index(pages))
        return BatchPlan([run], scratch, positions % PAGE_TOKENS, self._tables)

    def commit(self, plan: BatchPlan) -> None:
        """The batch has run: its keys and values count from now on."""
        self._tables = plan.tables

    def fork(self, src: int, dst: int, end: int) -> None:
        """Let the empty ``dst`` share the pages of ``src[:end]``."""
        self._tables = self._tables.replaced({dst: self._tables[src][: n_pages_of(end)]})

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        self._tables = self._tables.replaced({seq_id: self._tables[seq_id][: n_pages_of(length)]})

    def cut(self, seq_id: int, start: int, end: int, length: int, rotate: Rotate) -> None:
        """Forget [start, end) of a sequence of ``length`` tokens and move the later ones down.

        Keys that are not in f32 are expanded, rotated and rounded again. Pages that are affected are rebuilt aside and
        written at once: those that the sequence has for itself in place, those that it shares into pages of its own.

        Args:
            seq_id: the sequence.
            start: first token to forget.
            end: first token after those.
            length: tokens that it holds, more than ``end``.
            rotate: moves float32 keys [n, L, K, D] of so many blocks by a number of positions.
        """
        first = start // PAGE_TOKENS
        pages = self._tables[seq_id][: n_pages_of(length)]
        n_kept = start - first * PAGE_TOKENS  # tokens before the cut on the page where it begins
        positions = np.concatenate([np.arange(start - n_kept, start), np.arange(end, length)])
        unshared = [page for page in pages[first:] if not self._tables.is_shared(page)]
        n_wanted = n_pages_of(len(positions))
        target = (unshared + self._tables.free(max(0, n_wanted - len(unshared))))[:n_wanted]
        self._stores.put(target, self._stores.without(pages, positions, n_kept, start - end, rotate))
        self._tables = self._tables.replaced({seq_id: (*pages[:first], *target)})

    def drop(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._tables = self._tables.replaced({seq_id: ()})

    def export(self, seq_id: int, length: int, start: int = 0) -> Iterator[bytes]:
        """Keys and values of a sequence, in pieces: each plane [length - start, L, K, W], those of the keys first."""
        return self._stores.export(self._tables[seq_id], np.arange(start, length))

    def free(self, length: int) -> Pages | None:
        """Pages for so many tokens, which no sequence holds; None where there are not so many."""
        n = n_pages_of(length)
        return tuple(self._tables.free(n)) if n <= self._tables.n_free else None

    def continued(self, src: int, start: int, length: int) -> Pages:
        """Pages for a sequence that shares its first ``start`` tokens with ``src``; the last page is copied."""
        kept = self._tables[src][: start // PAGE_TOKENS]
        fresh = self._tables.free(n_pages_of(length) - len(kept))
        if start % PAGE_TOKENS:
            self._stores.copy([self._tables[src][len(kept)]], fresh[:1])
        return (*kept, *fresh)

    def sections(self, pages: Pages | None, length: int, start: int = 0) -> list[Section]:
        """What takes in what ``export`` gave, on pages that no sequence holds; without pages it is only checked."""
        return self._stores.sections(pages, np.arange(start, length))

    def set_tables(self, tables: PageTables) -> None:
        """Every sequence holds what it held when ``tables`` were those of this cache."""
        self._tables = tables

    def put(self, seq_id: int, pages: Pages, gone: int) -> None:
        """Let a sequence hold these pages, and ``gone`` before them no more."""
        self._tables = self._tables.replaced({seq_id: pages}, {seq_id: gone})

    def export_at(self, seq_id: int, positions: NDArray[np.intp]) -> Iterator[bytes]:
        """What ``export`` gives, of the tokens at some positions on a sequence's pages."""
        return self._stores.export(self._tables[seq_id], positions)

    @property
    def n_bytes(self) -> int:
        """Bytes of all pages."""
        return self._stores.n_bytes

    def _extended(self, spans: Sequence[tuple[int, int, int]]) -> PageTables:
        """Tables with pages for [start, stop) of some sequences, which keep [0, start)."""
        old = self._tables
        kept: dict[int, Pages] = {}
        copied: dict[int, int] = {}  # the last page of a sequence, if it must be copied
        n_new: dict[int, int] = {}
        for seq_id, start, stop in spans:
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
