"""The paged KV cache of a context.

It keeps no lengths: the context's ledger does, and says with each call how many tokens a sequence holds. What is on a
page behind the last token is never read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidSnapshot
from slm_native.kv.codecs import Array, Planes
from slm_native.kv.store import PAGE_TOKENS, HostPageStore, KvLayer, PageIndex, PageLayout, PageStore
from slm_native.kv.tables import Pages, PageTables

Rotate: TypeAlias = Callable[[Array, int, Sequence[int]], Array]
"""Moves float32 keys [n, L, K, D] by a number of positions; which blocks' they are [L] comes last."""
_ROTATED_AT_A_TIME = 256  # tokens; bounds what a cut takes besides the tokens themselves


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The tokens that a batch brings for one sequence.

    Attributes:
        seq_id: the sequence.
        rows: which tokens of the batch they are.
        start: position of the first.
        n_held: tokens that the sequence holds with them, S.
        pages: where those lie.
        both_ways: whether they all see each other, in place of those before each; of windows, they see what they would.
    """

    seq_id: int
    rows: slice | NDArray[np.intp]
    start: int
    n_held: int
    pages: PageIndex
    both_ways: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """Where the tokens of a batch go. The cache is unchanged until the plan is committed.

    Attributes:
        runs: one for each sequence of the batch.
        pages: the page of each token [T].
        slots: its place on that page [T].
        tables: the tables that hold once the batch has run.
    """

    runs: Sequence[Run]
    pages: Array
    slots: Array
    tables: PageTables

    @property
    def has_spans(self) -> bool:
        """Whether there are tokens that see others behind them, so that no part of the batch can be run alone."""
        return any(run.both_ways for run in self.runs)


class PagedKvCache:
    """Keys and values of several sequences.

    Layers whose heads are alike have a store together; a page is the same number in each.

    Args:
        layouts: of a page in each store.
        n_ctx: tokens that all sequences together may hold; what they share counts once.
        n_seq_max: sequences.
        new_store: makes pages of a layout, so many, where the kernel set computes.
        n_replayed: the most tokens that ``replay`` is asked for at once.

    Raises:
        InvalidOption: the system refuses so much memory.
    """

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        n_ctx: int,
        n_seq_max: int,
        new_store: Callable[[PageLayout, int], PageStore] = HostPageStore,
        n_replayed: int = 0,
    ) -> None:
        n_pages = self.n_pages_for(n_ctx, n_seq_max)
        # Pages that no sequence ever holds, and one more, as tokens may begin in the middle of a page.
        n_scratch = _n_pages(n_replayed) + 1 if n_replayed else 0
        self._stores = [new_store(layout, n_pages + n_scratch) for layout in layouts]
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
        """The cache of each layer that keeps keys and values, in the order of the model."""
        by_block = {
            block: layer
            for store in self._stores
            for block, layer in zip(store.layout.blocks, store.layers, strict=True)
        }
        return [by_block[block] for block in sorted(by_block)]

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
        spans = [(seq_id, rows, int(positions[rows][0])) for seq_id, rows in _rows_by_sequence(seq_ids)]
        tables = self._extended([(seq_id, start, start + _count(rows)) for seq_id, rows, start in spans])
        runs = []
        pages = np.empty(len(seq_ids), np.intp)
        for seq_id, rows, start in spans:
            held = np.array(tables[seq_id], np.intp)
            pages[rows] = held[positions[rows] // PAGE_TOKENS]
            runs.append(Run(seq_id, rows, start, start + _count(rows), _page_index(tables[seq_id])))
        return BatchPlan(runs, pages, (positions % PAGE_TOKENS).astype(np.intp), tables)

    def replay(self, seq_id: int, start: int, stop: int) -> BatchPlan:
        """A plan for tokens [start, stop) that a sequence holds already, at most as many as were announced.

        They see what it holds up to them, and their keys and values go where nobody reads them.
        """
        pages = self._tables[seq_id][: _n_pages(stop)]
        positions = np.arange(start, stop)
        scratch = self._scratch + positions // PAGE_TOKENS - start // PAGE_TOKENS
        run = Run(seq_id, slice(0, stop - start), start, stop, _page_index(pages))
        return BatchPlan([run], scratch, positions % PAGE_TOKENS, self._tables)

    def commit(self, plan: BatchPlan) -> None:
        """The batch has run: what it wrote is true from now on."""
        self._tables = plan.tables

    def fork(self, src: int, dst: int, end: int) -> None:
        """Let the empty ``dst`` share the pages of ``src[:end]``."""
        self._tables = self._tables.replaced({dst: self._tables[src][: _n_pages(end)]})

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        self._tables = self._tables.replaced({seq_id: self._tables[seq_id][: _n_pages(length)]})

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
        pages = self._tables[seq_id][: _n_pages(length)]
        n_kept = start - first * PAGE_TOKENS  # tokens before the cut on the page where it begins
        positions = np.concatenate([np.arange(start - n_kept, start), np.arange(end, length)])
        own = [page for page in pages[first:] if not self._tables.is_shared(page)]
        n_wanted = _n_pages(len(positions))
        target = (own + self._tables.free(max(0, n_wanted - len(own))))[:n_wanted]
        made = [self._without(store, pages, positions, n_kept, start - end, rotate) for store in self._stores]
        for store, tokens in zip(self._stores, made, strict=True):
            store.put(target, tokens)
        self._tables = self._tables.replaced({seq_id: (*pages[:first], *target)})

    def drop(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._tables = self._tables.replaced({seq_id: ()})

    def export(self, seq_id: int, length: int) -> bytes:
        """The keys and values of a sequence: each plane [length, L, K, W], those of the keys first."""
        pages, positions = self._tables[seq_id], np.arange(length)
        planes = [store.to_host(plane).tobytes() for store in self._stores for plane in store.read(pages, positions)]
        return b"".join(planes)

    def load(self, seq_id: int, length: int, payload: bytes) -> None:
        """Fill an empty sequence with what ``export`` gave.

        Raises:
            InvalidSnapshot: the wrong size, or numbers that are infinite or none.
        """
        n_bytes = length * sum(store.layout.page_bytes // PAGE_TOKENS for store in self._stores)
        if len(payload) != n_bytes:
            raise InvalidSnapshot(f"the KV payload has {len(payload)} bytes, {length} tokens take {n_bytes}")
        planes, offset = [], 0
        for store in self._stores:
            planes.append(_planes_in(payload, offset, length, store.layout))
            offset += sum(plane.nbytes for plane in planes[-1])
        pages = self._tables.free(_n_pages(length))
        for store, tokens in zip(self._stores, planes, strict=True):
            store.put(pages, store.packed(len(pages), [store.from_host(plane) for plane in tokens]))
        self._tables = self._tables.replaced({seq_id: tuple(pages)})

    def _extended(self, spans: Sequence[tuple[int, int, int]]) -> PageTables:
        """Tables with pages for [start, stop) of some sequences, of which [0, start) is kept."""
        old = self._tables
        kept: dict[int, Pages] = {}
        copied: dict[int, int] = {}  # the last page of a sequence, where it must be copied
        n_new: dict[int, int] = {}
        for seq_id, start, stop in spans:
            pages = old[seq_id][: _n_pages(start)]
            if start % PAGE_TOKENS and old.is_shared(pages[-1]):
                copied[seq_id] = pages[-1]
                pages = pages[:-1]
            kept[seq_id], n_new[seq_id] = pages, _n_pages(stop) - len(pages)
        fresh = iter(old.free(sum(n_new.values())) if any(n_new.values()) else ())
        changes = {seq_id: (*pages, *(next(fresh) for _ in range(n_new[seq_id]))) for seq_id, pages in kept.items()}
        targets = [changes[seq_id][len(kept[seq_id])] for seq_id in copied]
        for store in self._stores if copied else ():
            store.copy(list(copied.values()), targets)
        return old.replaced({seq_id: pages for seq_id, pages in changes.items() if pages != old[seq_id]})

    def _without(
        self, store: PageStore, pages: Pages, positions: NDArray[np.intp], n_kept: int, delta: int, rotate: Rotate
    ) -> Any:
        """A store's part of a cut: pages of the tokens at ``positions``, rotated from the ``n_kept``-th on."""
        tokens = store.read(pages, positions)
        _rotate(store, [plane[n_kept:] for plane in tokens], delta, rotate)
        return store.packed(_n_pages(len(positions)), tokens)


def _rotate(store: PageStore, planes: Planes, delta: int, rotate: Rotate) -> None:
    """Rotate the keys among ``planes`` [n_tokens, L, K, W] by ``delta`` positions, in place."""
    codec, blocks = store.keys, store.layout.blocks
    keys = planes[: len(codec.planes)]
    for first in range(0, len(keys[0]), _ROTATED_AT_A_TIME):
        chunk = [plane[first : first + _ROTATED_AT_A_TIME] for plane in keys]
        rotated = rotate(codec.decode(chunk), delta, blocks)
        for plane, part in zip(chunk, codec.encode(rotated), strict=True):
            plane[...] = part


def _planes_in(payload: bytes, offset: int, length: int, layout: PageLayout) -> list[NDArray[Any]]:
    """A store's planes [length, L, K, W] in a payload, from ``offset`` on.

    Raises:
        InvalidSnapshot: numbers that are infinite or none.
    """
    planes: list[NDArray[Any]] = []
    for dtype, width in layout.plane_types():
        shape = (length, layout.n_layers, layout.n_kv_heads, width)
        planes.append(np.frombuffer(payload, dtype, math.prod(shape), offset).reshape(shape))
        offset += planes[-1].nbytes
    n_keys = len(layout.keys.planes)
    if not (layout.keys.is_finite(planes[:n_keys]) and layout.values.is_finite(planes[n_keys:] or planes)):
        raise InvalidSnapshot("the KV payload holds numbers that are infinite or not numbers")
    return planes


def _n_pages(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)


def _count(rows: slice | NDArray[np.intp]) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _rows_by_sequence(seq_ids: NDArray[np.int32]) -> list[tuple[int, slice | NDArray[np.intp]]]:
    """The sequences of a batch and the rows of each, in order; a slice where they lie side by side."""
    if (seq_ids == seq_ids[0]).all():
        return [(int(seq_ids[0]), slice(0, len(seq_ids)))]
    order = np.argsort(seq_ids, kind="stable")
    bounds = np.flatnonzero(np.diff(seq_ids[order])) + 1
    found: list[tuple[int, slice | NDArray[np.intp]]] = []
    for rows in np.split(order, bounds):
        side_by_side = rows[-1] - rows[0] == len(rows) - 1
        found.append((int(seq_ids[rows[0]]), slice(int(rows[0]), int(rows[-1]) + 1) if side_by_side else rows))
    return found


def _page_index(pages: Pages) -> PageIndex:
    if pages == tuple(range(pages[0], pages[0] + len(pages))):
        return slice(pages[0], pages[0] + len(pages))
    return np.array(pages, np.intp)
