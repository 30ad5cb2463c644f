"""The memory of a context: keys and values on pages, states of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import ModelSpec
from slm_core.container import Pieces
from slm_core.context.payload import PayloadWriter, Section, SectionWriter
from slm_core.errors import InvalidSnapshot
from slm_core.types import ContextOptions
from slm_native.kernels import Device
from slm_native.kv import (
    PAGE_TOKENS,
    Array,
    BatchPlan,
    Held,
    HostPageStore,
    KvLayer,
    PagedKvCache,
    PageLayout,
    Rotate,
    WindowCache,
    in_blocks,
    in_model_order,
)
from slm_native.kv.tables import Pages
from slm_native.states import Checkpoint, State, StateGroup, StatePool

REPLAY_TOKENS = 256
"""Tokens that are decoded at a time in a replay."""


class KvLayouts(NamedTuple):
    """The page layouts of a context, one for each shape of heads.

    Attributes:
        full: layouts of the layers that keep all positions.
        windows: layouts of the layers that keep only their window, by window size.
    """

    full: Sequence[PageLayout]
    windows: Mapping[int, Sequence[PageLayout]]


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlan:
    """The destinations of a batch. Memory is unchanged until the plan is committed.

    Attributes:
        pages: destinations of keys and values.
        states: the batch's sequences, grouped, with their recurrent states.
        windows: destinations of keys and values in the layers that keep only their window, by window size.
        held: in a replay, the pages of each window after the replay.
    """

    pages: BatchPlan
    states: Sequence[StateGroup]
    windows: Mapping[int, BatchPlan] = field(default_factory=dict)
    held: Mapping[int, Held] = field(default_factory=dict)


class Past(NamedTuple):
    """The state of a sequence after its first ``position`` tokens, without the pages that keep all positions.

    Attributes:
        position: number of tokens.
        state: recurrent state; None without recurrent layers.
        windows: pages of the layers that keep only their window, by window size.
    """

    position: int
    state: State | None
    windows: Mapping[int, Held]


class ContextMemory:
    """All memory of a context; see ``PagedKvCache``, ``WindowCache`` and ``StatePool``.

    A truncation, or a fork of a part of a sequence, may need a ``Past`` that is not in memory. ``nearest`` returns an
    earlier ``Past``, and ``replay`` plans the batches that compute the later one again.

    Args:
        spec: the model.
        options: the sizes.
        layouts: the page layouts.
        device: the device of the kernels.

    Raises:
        InvalidOption: the system refuses to allocate the memory.
    """

    def __init__(self, spec: ModelSpec, options: ContextOptions, layouts: KvLayouts, device: Device) -> None:
        recurrent = [layer.recurrent for layer in spec.layers if layer.recurrent is not None]
        n_scratch = REPLAY_TOKENS if recurrent or layouts.windows else 1 if spec.n_mtp_layers else 0
        new_pages = device.new_pages if spec.attention_layers else HostPageStore  # pages of no layers are empty
        n_pages = PagedKvCache.n_pages_for(options.n_ctx, options.n_seq_max)
        self._pages = PagedKvCache(layouts.full, n_pages, options.n_seq_max, new_pages, n_scratch)
        self._windows = {
            window: WindowCache(each, window, options.n_batch, options.n_seq_max, REPLAY_TOKENS, new_pages)
            for window, each in layouts.windows.items()
        }
        self._states = StatePool(recurrent, options.n_seq_max, device) if recurrent else None
        sliding = [spec.layers[i].window for i in spec.attention_layers]
        self._reach = sum(window - 1 for window in sliding if window is not None)

    @property
    def layers(self) -> Sequence[KvLayer]:
        """The KV cache of each layer that keeps keys and values, in the order of the model."""
        by_block = dict(self._pages.by_block)
        for cache in self._windows.values():
            by_block |= cache.by_block
        return in_model_order(by_block)

    @property
    def n_bytes(self) -> int:
        """Bytes of all pages."""
        return self._pages.n_bytes + sum(cache.n_bytes for cache in self._windows.values())

    def plan(self, seq_ids: NDArray[np.int32], positions: NDArray[np.int32], ahead: NDArray[np.int32]) -> MemoryPlan:
        """Assign pages to the tokens of a batch; see ``PagedKvCache.plan`` and ``in_blocks``."""
        pages = self._pages.plan(seq_ids, positions)
        windows = {window: cache.plan(seq_ids, positions) for window, cache in self._windows.items()}
        if ahead.any():
            assert not windows, "the context declares no bidirectional blocks"
            pages = in_blocks(pages, ahead)
        return MemoryPlan(pages, [] if self._states is None else self._states.plan(pages.runs), windows)

    def commit(self, plan: MemoryPlan) -> None:
        """Make the batch's keys, values and states current, after it has run."""
        if self._states is not None:
            self._states.commit(plan.states, plan.pages.runs)
        for window, cache in self._windows.items():
            cache.commit(plan.windows[window])
        self._pages.commit(plan.pages)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Plans may be committed in the ``with`` block. After it, the page tables are as before."""
        assert self._states is None and not self._windows, "the context declares no MTP"
        tables = self._pages.tables
        try:
            yield
        finally:
            self._pages.set_tables(tables)

    def nearest(self, seq_id: int, length: int) -> Past:
        """The latest ``Past`` in memory within the first ``length`` tokens of a sequence."""
        if self._states is not None:
            return Past(*self._states.nearest(seq_id, length), {})
        held_by_window = {window: cache.held(seq_id, length) for window, cache in self._windows.items()}
        held = {window: pages for window, pages in held_by_window.items() if pages is not None}
        if len(held) == len(held_by_window):
            return Past(length, None, held)
        first = max(0, self._first_needed(length) - self._reach) // PAGE_TOKENS
        return Past(first * PAGE_TOKENS, None, {window: Held(first, ()) for window in held_by_window})

    def replay(self, seq_id: int, past: Past, stop: int) -> MemoryPlan:
        """Plan the batch that computes the ``Past`` after ``stop`` tokens from an earlier one; it is never committed.

        Args:
            seq_id: the sequence, which contains these tokens. Pages that keep all positions are read, and not written.
            past: the ``Past`` to start from, at most ``REPLAY_TOKENS`` tokens before ``stop``.
            stop: number of tokens after the replay.
        """
        pages = self._pages.replay(seq_id, past.position, stop)
        plans, held = {}, {}
        for window, cache in self._windows.items():
            plans[window], held[window] = cache.replay(seq_id, past.windows[window], past.position, stop)
        states = [] if past.state is None else [StateGroup([seq_id], pages.runs[0].rows, [past.state])]
        return MemoryPlan(pages, states, plans, held)

    def replayed(self, plan: MemoryPlan, stop: int) -> Past:
        """The ``Past`` after a batch that ``replay`` planned has run."""
        return Past(stop, plan.states[0].states()[0] if plan.states else None, plan.held)

    def fork(self, src: int, dst: int, past: Past) -> None:
        """Let the empty ``dst`` share the first ``past.position`` tokens of ``src``."""
        self._pages.fork(src, dst, past.position)
        for window, cache in self._windows.items():
            cache.put(dst, past.windows[window])
        if self._states is not None and past.state is not None:
            self._states.fork(src, dst, Checkpoint(past.position, past.state))

    def truncate(self, seq_id: int, past: Past) -> None:
        """Remove all but the first ``past.position`` tokens."""
        self._pages.truncate(seq_id, past.position)
        for window, cache in self._windows.items():
            cache.put(seq_id, past.windows[window])
        if self._states is not None and past.state is not None:
            self._states.put(seq_id, Checkpoint(past.position, past.state))

    def cut(self, seq_id: int, start: int, end: int, length: int, rotate: Rotate) -> None:
        """See ``PagedKvCache.cut``. Recurrent states and windows do not support cuts."""
        assert self._states is None and not self._windows, "the context declares no cut"
        self._pages.cut(seq_id, start, end, length, rotate)

    def drop(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._pages.drop(seq_id)
        for cache in self._windows.values():
            cache.drop(seq_id)
        if self._states is not None:
            self._states.drop(seq_id)

    def export(self, seq_id: int, length: int, start: int = 0) -> Pieces:
        """The payload of a sequence: keys and values from ``start`` on, then of all windows, then the state."""
        parts = [self._pages.export(seq_id, length, start)]
        parts += [cache.export(seq_id, length) for cache in self._windows.values()]
        parts += [] if self._states is None else [self._states.export(seq_id)]
        return Pieces(SectionWriter(self._sections(length, start=start)).n_bytes, chain.from_iterable(parts))

    def check(self, length: int, payload: bytes) -> None:
        """Check a payload of ``export`` for a sequence of ``length`` tokens.

        Raises:
            InvalidSnapshot: the wrong size, or numbers that no model computes.
        """
        checker = SectionWriter(self._sections(length))
        _check_size(checker, length, len(payload))
        checker.write(memoryview(payload))

    def writer(
        self,
        seq_id: int,
        length: int,
        n_bytes: int,
        edited: Callable[[], None],
        shared: tuple[int, int] | None = None,
        *,
        reserves: bool = False,
    ) -> MemoryWriter | None:
        """A writer for the payload of a sequence; None if there are too few free pages.

        Args:
            seq_id: the sequence.
            length: its length after the import.
            n_bytes: size of the payload.
            edited: called when the contents of the sequence have changed.
            shared: a sequence and the number of its first tokens to share; the payload has the later tokens.
            reserves: whether an empty sequence gets the pages at once, so that other sequences may change meanwhile;
                ``undo`` empties it.

        Raises:
            InvalidSnapshot: the size does not match the number of tokens.
        """
        start = 0 if shared is None else shared[1]
        _check_size(SectionWriter(self._sections(length, start=start)), length, n_bytes)
        pages = self._pages.free(length) if shared is None else self._pages.continued(*shared, length)
        free_pages = {window: cache.free(length) for window, cache in self._windows.items()}
        window_pages = {window: free for window, free in free_pages.items() if free is not None}
        if pages is None or len(window_pages) < len(free_pages):
            return None
        parts: list[Array] = []
        sections = self._sections(length, pages, window_pages, parts, start=start)

        def reserve() -> None:
            self._pages.put(seq_id, pages, 0)
            for window, cache in self._windows.items():
                cache.put(seq_id, window_pages[window])

        def exchange() -> None:
            reserve()
            if self._states is not None:
                self._states.exchange(seq_id, length, parts)

        undo = partial(self.drop, seq_id) if reserves else self._undo(seq_id)
        if reserves:
            reserve()
        return MemoryWriter(SectionWriter(sections), exchange, undo, edited)

    def _undo(self, seq_id: int) -> Callable[[], None]:
        """A function that restores the current pages and states."""
        caches: list[PagedKvCache | WindowCache] = [self._pages, *self._windows.values()]
        tables = [cache.tables for cache in caches]
        checkpoints = None if self._states is None else self._states.held(seq_id)

        def undo() -> None:
            for cache, before in zip(caches, tables, strict=True):
                cache.set_tables(before)
            if self._states is not None and checkpoints is not None:
                self._states.hold(seq_id, checkpoints)

        return undo

    def _sections(
        self,
        length: int,
        pages: Pages | None = None,
        held: Mapping[int, Held] | None = None,
        parts: list[Array] | None = None,
        *,
        start: int = 0,
    ) -> list[Section]:
        """The sections of a payload: pages, the pages of each window, and states if there are any.

        Args:
            length: length of the sequence.
            pages: destinations of keys and values; None to check only.
            held: destinations of keys and values in windows; None to check only.
            parts: list to which the parts of the states are appended.
            start: the first token with keys and values in the payload.
        """
        sections = self._pages.sections(pages, length, start)
        for window, cache in self._windows.items():
            sections += cache.sections(None if held is None else held[window].pages, length)
        return sections if self._states is None else sections + self._states.sections([] if parts is None else parts)

    def _first_needed(self, length: int) -> int:
        """The start of the first page that any window of the next token reaches."""
        return min((cache.first_exported(length) for cache in self._windows.values()), default=length)


class MemoryWriter(PayloadWriter):
    """Writes the payload of a sequence to free pages.

    Args:
        sections: the sections of the payload.
        exchange: makes the new pages and states current.
        undo: restores the previous pages and states.
        edited: called when the contents of the sequence have changed.
    """

    def __init__(
        self,
        sections: SectionWriter,
        exchange: Callable[[], None],
        undo: Callable[[], None],
        edited: Callable[[], None],
    ) -> None:
        self._sections, self._exchange, self._undo, self._edited = sections, exchange, undo, edited

    def write(self, piece: memoryview) -> None:
        """Check the numbers of a piece and write it."""
        self._sections.write(piece)

    def put(self) -> None:
        """Make the new pages and states current."""
        self._sections.check_whole()
        self._exchange()
        self._edited()

    def undo(self) -> None:
        """Restore the previous pages and states."""
        self._undo()
        self._edited()


def _check_size(sections: SectionWriter, length: int, n_bytes: int) -> None:
    if n_bytes != sections.n_bytes:
        raise InvalidSnapshot(f"the KV payload has {n_bytes} bytes, {length} tokens take {sections.n_bytes}")
