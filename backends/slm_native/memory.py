"""What a context remembers of its sequences: keys and values on pages, states of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import ModelSpec
from slm_core.container import Pieces
from slm_core.context.payload import PayloadWriter, Section, SectionWriter
from slm_core.errors import InvalidSnapshot
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


class Room(NamedTuple):
    """What a context shall remember.

    Attributes:
        n_ctx: tokens that all sequences together may hold.
        n_batch: tokens of the largest batch.
        n_seq_max: sequences.
        layouts: of pages, one for each group of layers whose heads are alike, and that keep everything.
        windows: likewise, of layers that keep only their window, by that.
    """

    n_ctx: int
    n_batch: int
    n_seq_max: int
    layouts: Sequence[PageLayout]
    windows: Mapping[int, Sequence[PageLayout]]


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlan:
    """Where a batch goes. Nothing has changed until it is committed.

    Attributes:
        pages: where keys and values go.
        states: the sequences of the batch, and where their new states go.
        windows: where keys and values go in layers that keep only their window, by that.
        held: what of a sequence is held in those, where it is computed again.
    """

    pages: BatchPlan
    states: Sequence[StateGroup]
    windows: Mapping[int, BatchPlan] = field(default_factory=dict)
    held: Mapping[int, Held] = field(default_factory=dict)


class Past(NamedTuple):
    """What is remembered of the first tokens of a sequence, besides keys and values that are kept for good.

    Attributes:
        position: how many tokens.
        state: of recurrent layers; None where there are none.
        windows: of layers that keep only their window, by that.
    """

    position: int
    state: State | None
    windows: Mapping[int, Held]


class ContextMemory:
    """All that a context remembers; see ``PagedKvCache``, ``WindowCache`` and ``StatePool``.

    Truncation, and a fork of a part, need a past that may not be kept: ``nearest`` finds an earlier one, and
    ``replay`` plans the batches that compute it again.

    Args:
        spec: the model.
        room: the sizes.
        device: its device.

    Raises:
        InvalidOption: the system refuses so much memory.
    """

    def __init__(self, spec: ModelSpec, room: Room, device: Device) -> None:
        recurrent = [layer.recurrent for layer in spec.layers if layer.recurrent is not None]
        n_scratch = REPLAY_TOKENS if recurrent or room.windows else 0
        new_pages = device.new_pages if spec.attention_layers else HostPageStore  # without, they hold nothing
        n_pages = PagedKvCache.n_pages_for(room.n_ctx, room.n_seq_max)
        self._pages = PagedKvCache(room.layouts, n_pages, room.n_seq_max, new_pages, n_scratch)
        self._windows = {
            window: WindowCache(layouts, window, room.n_batch, room.n_seq_max, REPLAY_TOKENS, new_pages)
            for window, layouts in room.windows.items()
        }
        self._states = StatePool(recurrent, room.n_seq_max, device) if recurrent else None
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
        """Find a place for the tokens of a batch; see ``PagedKvCache.plan`` and ``in_blocks``."""
        pages = self._pages.plan(seq_ids, positions)
        windows = {window: cache.plan(seq_ids, positions) for window, cache in self._windows.items()}
        if ahead.any():
            assert not windows, "the context declares no spans"
            pages = in_blocks(pages, ahead)
        return MemoryPlan(pages, [] if self._states is None else self._states.plan(pages.runs), windows)

    def commit(self, plan: MemoryPlan) -> None:
        """The batch has run: its keys, values and states count from now on."""
        if self._states is not None:
            self._states.commit(plan.states, plan.pages.runs)
        for window, cache in self._windows.items():
            cache.commit(plan.windows[window])
        self._pages.commit(plan.pages)

    def nearest(self, seq_id: int, length: int) -> Past:
        """The last past that is kept of a sequence's first ``length`` tokens."""
        if self._states is not None:
            return Past(*self._states.nearest(seq_id, length), {})
        held_by_window = {window: cache.held(seq_id, length) for window, cache in self._windows.items()}
        held = {window: each for window, each in held_by_window.items() if each is not None}
        if len(held) == len(held_by_window):
            return Past(length, None, held)
        first = max(0, self._first_needed(length) - self._reach) // PAGE_TOKENS
        return Past(first * PAGE_TOKENS, None, {window: Held(first, ()) for window in held_by_window})

    def replay(self, seq_id: int, past: Past, stop: int) -> MemoryPlan:
        """A plan to compute the past after ``stop`` tokens from an earlier one; it is not committed.

        Args:
            seq_id: the sequence, which holds these tokens: keys and values that are kept are read, not written again.
            past: what is known before them, at most ``REPLAY_TOKENS``.
            stop: after how many tokens.
        """
        pages = self._pages.replay(seq_id, past.position, stop)
        plans, held = {}, {}
        for window, cache in self._windows.items():
            plans[window], held[window] = cache.replay(seq_id, past.windows[window], past.position, stop)
        states = [] if past.state is None else [StateGroup([seq_id], pages.runs[0].rows, [past.state])]
        return MemoryPlan(pages, states, plans, held)

    def replayed(self, plan: MemoryPlan, stop: int) -> Past:
        """What ``replay`` planned has been computed."""
        return Past(stop, plan.states[0].states()[0] if plan.states else None, plan.held)

    def fork(self, src: int, dst: int, past: Past) -> None:
        """Let the empty ``dst`` share the first tokens of ``src``, of which this is the past."""
        self._pages.fork(src, dst, past.position)
        for window, cache in self._windows.items():
            cache.put(dst, past.windows[window])
        if self._states is not None and past.state is not None:
            self._states.fork(src, dst, Checkpoint(past.position, past.state))

    def truncate(self, seq_id: int, past: Past) -> None:
        """Remove all but the first tokens, whose past this is."""
        self._pages.truncate(seq_id, past.position)
        for window, cache in self._windows.items():
            cache.put(seq_id, past.windows[window])
        if self._states is not None and past.state is not None:
            self._states.put(seq_id, Checkpoint(past.position, past.state))

    def cut(self, seq_id: int, start: int, end: int, length: int, rotate: Rotate) -> None:
        """See ``PagedKvCache.cut``; states and windows have no cuts."""
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
        """The keys and values of a sequence from ``start`` on, all of those in windows, then its state."""
        parts = [self._pages.export(seq_id, length, start)]
        parts += [cache.export(seq_id, length) for cache in self._windows.values()]
        parts += [] if self._states is None else [self._states.export(seq_id)]
        return Pieces(SectionWriter(self._sections(length, start=start)).n_bytes, chain.from_iterable(parts))

    def check(self, length: int, payload: bytes) -> None:
        """Refuse what ``export`` never gave for a sequence of ``length`` tokens.

        Raises:
            InvalidSnapshot: the wrong size, or numbers that no model computes.
        """
        checker = SectionWriter(self._sections(length))
        _check_size(checker, length, len(payload))
        checker.write(memoryview(payload))

    def writer(
        self, seq_id: int, length: int, n_bytes: int, edited: Callable[[], None], shared: tuple[int, int] | None = None
    ) -> MemoryWriter | None:
        """What takes in a payload for a sequence; None where there are no pages besides those that sequences hold.

        Args:
            seq_id: the sequence.
            length: its length then.
            n_bytes: of the payload.
            edited: called when the sequence holds something else.
            shared: a sequence whose first tokens it shares, and how many; the payload has those after them.

        Raises:
            InvalidSnapshot: no payload of so many tokens has so many bytes.
        """
        start = 0 if shared is None else shared[1]
        _check_size(SectionWriter(self._sections(length, start=start)), length, n_bytes)
        pages = self._pages.free(length) if shared is None else self._pages.continued(*shared, length)
        windows = {window: cache.free(length) for window, cache in self._windows.items()}
        held = {window: each for window, each in windows.items() if each is not None}
        if pages is None or len(held) < len(windows):
            return None
        parts: list[Array] = []
        sections = self._sections(length, pages, held, parts, start=start)

        def exchange() -> None:
            self._pages.put(seq_id, pages, 0)
            for window, cache in self._windows.items():
                cache.put(seq_id, held[window])
            if self._states is not None:
                self._states.exchange(seq_id, length, parts)

        return MemoryWriter(SectionWriter(sections), exchange, self._undo(seq_id), edited)

    def _undo(self, seq_id: int) -> Callable[[], None]:
        """What makes sequences hold what they hold now."""
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
        """The sections of a payload: of pages, of each window's pages, and of states where there are some.

        Args:
            length: of the sequence.
            pages: where keys and values go; without, they are only checked.
            held: likewise in windows.
            parts: where the parts of states are appended.
            start: the first token whose keys and values on pages it has.
        """
        sections = self._pages.sections(pages, length, start)
        for window, cache in self._windows.items():
            sections += cache.sections(None if held is None else held[window].pages, length)
        return sections if self._states is None else sections + self._states.sections([] if parts is None else parts)

    def _first_needed(self, length: int) -> int:
        """The first token that any window shows to the next one, from the beginning of its page."""
        return min((cache.first_exported(length) for cache in self._windows.values()), default=length)


class MemoryWriter(PayloadWriter):
    """Takes in the payload of a sequence on pages that none holds.

    Args:
        sections: what takes in its bytes.
        exchange: makes the sequence hold what was taken in.
        undo: makes it hold what it held before.
        edited: called when the sequence holds something else.
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
        """Write it, and check its numbers."""
        self._sections.write(piece)

    def put(self) -> None:
        """Exchange the tables and the state."""
        self._sections.check_whole()
        self._exchange()
        self._edited()

    def undo(self) -> None:
        """Exchange them again."""
        self._undo()
        self._edited()


def _check_size(sections: SectionWriter, length: int, n_bytes: int) -> None:
    if n_bytes != sections.n_bytes:
        raise InvalidSnapshot(f"the KV payload has {n_bytes} bytes, {length} tokens take {sections.n_bytes}")
