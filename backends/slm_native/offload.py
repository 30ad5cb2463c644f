"""The layers of a model: all there, or some there and the others loaded while the layers before them compute."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from slm_core.errors import DecodeFailed, InvalidOption
from slm_native.steps import Step

Steps: TypeAlias = Sequence[Step]
StepsAt: TypeAlias = Callable[[int], Steps]
"""Gives the steps at place ``i``. The caller keeps no reference to the steps before: their memory is needed."""
_BUFFERS = 2  # one layer computes, one is on its way


class Offload(NamedTuple):
    """Which blocks stay, and how much memory blocks may take.

    Attributes:
        budget: bytes of their packed weights; weights outside the blocks do not count.
        pinned_layers: layers that always stay; None for as many as fit, evenly spread.
    """

    budget: int
    pinned_layers: Sequence[int] | None = None


@dataclass(slots=True)
class OffloadStats:
    """What streaming has cost so far.

    Attributes:
        budget: bytes that the weights of blocks may take.
        pinned_layers: the blocks that always stay.
        hits: blocks that were there when they were wanted, pinned ones included.
        stalls: blocks that were waited for.
        stalled_seconds: for how long, in all.
        loads: loaded blocks, without resident ones.
        loaded_bytes: their weights.
        held_bytes: weights of blocks that are there now, or on their way.
        most_held_bytes: the most that ever were.
    """

    budget: int
    pinned_layers: tuple[int, ...]
    hits: int = 0
    stalls: int = 0
    stalled_seconds: float = 0.0
    loads: int = 0
    loaded_bytes: int = 0
    held_bytes: int = 0
    most_held_bytes: int = 0


class Layers(ABC):
    """The steps of a model's layers, for passes through all of them in order."""

    @abstractmethod
    def __len__(self) -> int:
        """Places at which there are steps."""

    @abstractmethod
    def walk(self) -> AbstractContextManager[StepsAt]:
        """One pass; indices only grow in it."""

    @abstractmethod
    def describe(self) -> Sequence[str]:
        """The steps, each in one line."""

    @property
    @abstractmethod
    def stats(self) -> OffloadStats | None:
        """Statistics of offloading; None if nothing is offloaded."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all weights, now."""


class ResidentLayers(Layers):
    """Layers that are all there, as one list of steps; any number of passes at once.

    Args:
        steps: of all layers, in order.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def __len__(self) -> int:
        """All steps are at one place."""
        return 1

    @contextmanager
    def walk(self) -> Iterator[StepsAt]:
        """There is nothing to do."""
        yield lambda i: self.steps

    def describe(self) -> Sequence[str]:
        """As fused by the tier."""
        return [step.describe() for step in self.steps]

    @property
    def stats(self) -> None:
        """Nothing is streamed."""

    def close(self) -> None:
        """The last references to the weights, if no pass runs."""
        self.steps = ()


class OffloadedLayers(Layers):
    """Streams the blocks that do not fit in memory through two buffers, on another thread.

    While a block computes, the next one that is not there is loaded; blocks that stay lie between those that come, so
    that loading has their time, too. Passes take turns: another thread's waits until this one's is over. A cache that
    dropped the block used longest ago would never hit, as blocks are used in a circle; what stays here, hits always.

    Args:
        load: makes the steps of a layer, with memory of their own; called on another thread.
        sizes: bytes of each block's weights.
        offload: what stays, and the bound on what is held at any time.
        settle: returns once all that was asked of the device is done, see ``KernelSet.settle``.
        progress: called with the share of the blocks to stay that is loaded.

    Raises:
        InvalidOption: the bound is too low for two blocks and those to stay, or there are no such blocks.
    """

    def __init__(
        self,
        load: Callable[[int], Steps],
        sizes: Sequence[int],
        offload: Offload,
        settle: Callable[[], None],
        progress: Callable[[float], None],
    ) -> None:
        pinned = choose_pinned(sizes, offload)
        self._load, self._sizes, self._settle = load, sizes, settle
        self._streamed = [i for i in range(len(sizes)) if i not in pinned]
        self._stats = OffloadStats(offload.budget, tuple(pinned))
        self._pinned: dict[int, Steps] = {}
        for i in pinned:
            self._hold(sizes[i])
            self._pinned[i] = load(i)
            progress(len(self._pinned) / len(pinned))
        self._ahead: deque[tuple[int, Future[Steps]]] = deque()
        self._in_use: int | None = None  # a streamed block that a pass was given
        self._turn = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "slm-layers")

    def __len__(self) -> int:
        """The layers are at places of their own."""
        return len(self._sizes)

    @contextmanager
    def walk(self) -> Iterator[StepsAt]:
        """Waits for the pass that another thread is in."""
        with self._turn:
            try:
                yield self._block
            finally:
                self._release()

    def describe(self) -> Sequence[str]:
        """A line for each layer."""
        held = {i: "; ".join(step.describe() for step in steps) for i, steps in self._pinned.items()}
        return [held.get(i, f"layer {i}: loaded in every pass") for i in range(len(self._sizes))]

    @property
    def stats(self) -> OffloadStats:
        """A copy; numbers of a pass that runs are on their way."""
        return replace(self._stats)

    def close(self) -> None:
        """End the thread, then let go of the blocks."""
        with self._turn:
            self._worker.shutdown(cancel_futures=True)
            self._ahead.clear()
            self._pinned.clear()
            self._stats.held_bytes = 0

    def _block(self, i: int) -> Steps:
        self._release()
        if (pinned := self._pinned.get(i)) is not None:
            self._stats.hits += 1
            return pinned
        self._forget_until(i)
        if not self._ahead:
            self._send_for(i)
        _, loading = self._ahead.popleft()
        block = self._awaited(i, loading)
        self._in_use = i
        self._load_ahead()
        return block

    def _awaited(self, i: int, loading: Future[Steps]) -> Steps:
        if loading.done():
            self._stats.hits += 1
        else:
            start = time.perf_counter()
            wait([loading])
            self._stats.stalls += 1
            self._stats.stalled_seconds += time.perf_counter() - start
        try:
            return loading.result()
        except Exception as error:
            self._hold(-self._sizes[i])
            raise DecodeFailed(f"layer {i} could not be loaded: {type(error).__name__}: {error}") from error

    def _release(self) -> None:
        """The block in use is not any more; its buffer takes the next."""
        if self._in_use is None:
            return
        self._settle()
        self._hold(-self._sizes[self._in_use])
        last, self._in_use = self._in_use, None
        self._load_ahead(last)

    def _load_ahead(self, last: int | None = None) -> None:
        """Send for blocks while there is a buffer for one."""
        while len(self._ahead) + (self._in_use is not None) < _BUFFERS:
            before = self._ahead[-1][0] if self._ahead else last if last is not None else self._in_use
            assert before is not None, "a block is in use, or was"
            self._send_for(next((i for i in self._streamed if i > before), self._streamed[0]))

    def _send_for(self, i: int) -> None:
        self._hold(self._sizes[i])
        self._stats.loads += 1
        self._stats.loaded_bytes += self._sizes[i]
        self._ahead.append((i, self._worker.submit(self._loaded, i)))

    def _loaded(self, i: int) -> Steps:
        block = self._load(i)
        self._settle()
        return block

    def _forget_until(self, i: int) -> None:
        """Drop the blocks that were loaded for a pass that ended early."""
        while self._ahead and self._ahead[0][0] != i:
            other, loading = self._ahead.popleft()
            if not loading.cancel():
                wait([loading])
            self._hold(-self._sizes[other])

    def _hold(self, n_bytes: int) -> None:
        self._stats.held_bytes += n_bytes
        self._stats.most_held_bytes = max(self._stats.most_held_bytes, self._stats.held_bytes)


def choose_pinned(sizes: Sequence[int], offload: Offload) -> list[int]:
    """The blocks that stay.

    Args:
        sizes: bytes of each block's weights.
        offload: the options.

    Raises:
        InvalidOption: there is no room for two blocks and those to stay, or there are no such blocks.
    """
    everything = range(len(sizes))
    if offload.pinned_layers is not None:
        if bad := [i for i in offload.pinned_layers if i not in everything]:
            raise InvalidOption(f"pinned_layers has {bad[0]} (accepted: 0 to {len(sizes) - 1})")
        candidates = [sorted(set(offload.pinned_layers))]
    else:
        candidates = [_all_but(n, len(sizes)) for n in range(len(sizes) + 1)]
    needed = [_needed(sizes, pinned) for pinned in candidates]
    for pinned, n_bytes in zip(candidates, needed, strict=True):
        if n_bytes <= offload.budget:
            return pinned
    raise InvalidOption(
        f"resident_bytes is {offload.budget}, and at least {min(needed)} are needed: two layers are there at any time,"
        f" besides those that stay (all {len(sizes)} take {sum(sizes)})"
    )


def _all_but(n_streamed: int, n: int) -> list[int]:
    streamed = {j * n // n_streamed for j in range(n_streamed)}
    return [i for i in range(n) if i not in streamed]


def _needed(sizes: Sequence[int], pinned: Sequence[int]) -> int:
    streamed = sorted(size for i, size in enumerate(sizes) if i not in set(pinned))
    return sum(sizes[i] for i in pinned) + sum(streamed[-_BUFFERS:])
