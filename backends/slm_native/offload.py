"""The steps of a model's layers: all in memory, or some in memory and the others loaded ahead of their use."""

from __future__ import annotations

import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from slm_core.errors import DecodeFailed, InvalidOption
from slm_core.interrupts import uninterrupted, wait_s
from slm_native.steps import Step

Steps: TypeAlias = Sequence[Step]
StepsAt: TypeAlias = Callable[[int], Steps]
"""Returns the steps at an index. The caller must not keep earlier steps: their memory is reused."""
_BUFFERS = 2  # one layer computes, one loads


class Offload(NamedTuple):
    """The memory budget of blocks, and the blocks that stay in memory.

    Attributes:
        budget: bytes for the packed weights of blocks; weights outside the blocks do not count.
        pinned_layers: layers that stay in memory; None for all that fit, evenly spread.
    """

    budget: int
    pinned_layers: Sequence[int] | None = None


@dataclass(slots=True)
class OffloadStats:
    """Counters of offloading since the model was loaded.

    Attributes:
        budget: bytes for the weights of blocks.
        pinned_layers: blocks that stay in memory.
        hits: blocks that were in memory when needed, pinned blocks included.
        stalls: blocks that were not in memory when needed, so that the forward pass waited.
        stalled_seconds: total time of these waits, in seconds.
        loads: loads of blocks that are not pinned.
        loaded_bytes: bytes of these loads.
        held_bytes: bytes of the blocks that are in memory or loading now.
        most_held_bytes: the largest ``held_bytes`` so far.
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
    """The steps of a model's layers, for forward passes in order."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of indices that ``walk`` accepts."""

    @abstractmethod
    def walk(self) -> AbstractContextManager[StepsAt]:
        """One forward pass. Indices must increase within it."""

    @abstractmethod
    def describe(self) -> Sequence[str]:
        """The steps, one line each."""

    @property
    @abstractmethod
    def stats(self) -> OffloadStats | None:
        """Statistics of offloading; None if nothing is offloaded."""

    @abstractmethod
    def close(self) -> None:
        """Release all weights."""


class ResidentLayers(Layers):
    """Layers that are all in memory, as one list of steps. Passes may run concurrently.

    Args:
        steps: the steps of all layers, in order.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def __len__(self) -> int:
        """One index for all steps."""
        return 1

    @contextmanager
    def walk(self) -> Iterator[StepsAt]:
        """Nothing to load or lock."""
        yield lambda i: self.steps

    def describe(self) -> Sequence[str]:
        """The steps after fusion by the tier."""
        return [step.describe() for step in self.steps]

    @property
    def stats(self) -> None:
        """Nothing is offloaded."""

    def close(self) -> None:
        """Drop the last references to the weights, if no pass runs."""
        self.steps = ()


class OffloadedLayers(Layers):
    """Loads the blocks that do not fit in memory on a second thread, into two buffers.

    While a block computes, the next block that is not pinned is loaded. Pinned blocks are spread between the others, so
    that loading overlaps with their computation, too. Only one pass runs at a time; other threads wait. Blocks are used
    cyclically: an LRU cache would never hit, while pinned blocks always hit.

    Args:
        load: loads the steps of a layer into new memory; called on the second thread.
        sizes: bytes of each block's weights.
        offload: the pinned blocks and the budget.
        settle: waits for the device to finish, see ``KernelSet.settle``.
        progress: called with the share of the pinned blocks that is loaded.

    Raises:
        InvalidOption: the budget is too small for the pinned blocks and two more, or a pinned layer does not exist.
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
            self._count_held(sizes[i])
            self._pinned[i] = load(i)
            progress(len(self._pinned) / len(pinned))
        self._ahead: deque[tuple[int, Future[Steps]]] = deque()
        self._in_use: int | None = None  # the unpinned block that the current pass computes
        self._pass_lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "slm-layers")

    def __len__(self) -> int:
        """One index for each layer."""
        return len(self._sizes)

    @contextmanager
    def walk(self) -> Iterator[StepsAt]:
        """Wait for another thread's pass to end, then run one."""
        with self._pass_lock:
            self._forget_failed()
            try:
                yield self._block
            finally:
                self._release()

    def describe(self) -> Sequence[str]:
        """One line for each layer."""
        pinned = {i: "; ".join(step.describe() for step in steps) for i, steps in self._pinned.items()}
        return [pinned.get(i, f"layer {i}: loaded in every pass") for i in range(len(self._sizes))]

    @property
    def stats(self) -> OffloadStats:
        """A copy. During a pass, its numbers may be incomplete."""
        return replace(self._stats)

    def close(self) -> None:
        """End the thread, then release the blocks."""
        with self._pass_lock:
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
            self._start_loading(i)
        _, loading = self._ahead[0]
        self._wait_for(loading)
        self._ahead.popleft()
        block = self._result(i, loading)
        self._in_use = i
        self._load_ahead()
        return block

    def _wait_for(self, loading: Future[Steps]) -> None:
        """Wait for a block. An interrupt ends the wait: the source may be slow, and the next pass may use the block."""
        if loading.done():
            self._stats.hits += 1
            return
        start = time.perf_counter()
        _wait_until_done(loading)
        self._stats.stalls += 1
        self._stats.stalled_seconds += time.perf_counter() - start

    def _result(self, i: int, loading: Future[Steps]) -> Steps:
        try:
            return loading.result()
        except BaseException as error:
            self._count_held(-self._sizes[i])
            if not isinstance(error, Exception):
                raise
            raise DecodeFailed(f"layer {i} could not be loaded: {type(error).__name__}: {error}") from error

    def _release(self) -> None:
        """Free the buffer of the block in use, and load the next block into it."""
        if self._in_use is None:
            return
        self._settle()
        self._count_held(-self._sizes[self._in_use])
        last, self._in_use = self._in_use, None
        self._load_ahead(last)

    def _load_ahead(self, last: int | None = None) -> None:
        """Start loading blocks while a buffer is free."""
        while len(self._ahead) + (self._in_use is not None) < _BUFFERS:
            before = self._ahead[-1][0] if self._ahead else last if last is not None else self._in_use
            assert before is not None, "a block is in use, or was"
            self._start_loading(next((i for i in self._streamed if i > before), self._streamed[0]))

    def _start_loading(self, i: int) -> None:
        self._count_held(self._sizes[i])
        self._stats.loads += 1
        self._stats.loaded_bytes += self._sizes[i]
        self._ahead.append((i, self._worker.submit(self._load_block, i)))

    def _load_block(self, i: int) -> Steps:
        try:
            block = self._load(i)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # a caller may keep the error: its frames refer to weights
            raise
        self._settle()
        return block

    def _forget_until(self, i: int | None) -> None:
        """Drop blocks that were loaded for a pass that ended early; None drops all."""
        while self._ahead and self._ahead[0][0] != i:
            other, loading = self._ahead[0]
            if not loading.cancel():
                _wait_until_done(loading)
            self._ahead.popleft()
            self._count_held(-self._sizes[other])

    def _forget_failed(self) -> None:
        """Drop loads that failed after the last pass: the next read may succeed."""
        if any(loading.done() and loading.exception() is not None for _, loading in self._ahead):
            self._forget_until(None)

    def _count_held(self, n_bytes: int) -> None:
        self._stats.held_bytes += n_bytes
        self._stats.most_held_bytes = max(self._stats.most_held_bytes, self._stats.held_bytes)


def _wait_until_done(loading: Future[Steps]) -> None:
    """Wait for a load that is not cancelled; interrupts end the wait.

    An interrupt in `concurrent.futures.wait` would leave a cycle of references, which keeps the layer in memory.
    """
    with uninterrupted.paused():
        while not loading.done():
            with suppress(TimeoutError):
                loading.exception(wait_s())


def choose_pinned(sizes: Sequence[int], offload: Offload) -> list[int]:
    """Choose the pinned blocks.

    Args:
        sizes: bytes of each block's weights.
        offload: the budget and the layers to pin.

    Raises:
        InvalidOption: the budget is too small for the pinned blocks and two more, or a pinned layer does not exist.
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
        f"resident_bytes is {offload.budget}, and at least {min(needed)} are needed: two layers are in memory at any"
        f" time, besides the pinned layers (all {len(sizes)} layers take {sum(sizes)})"
    )


def _all_but(n_streamed: int, n: int) -> list[int]:
    streamed = {j * n // n_streamed for j in range(n_streamed)}
    return [i for i in range(n) if i not in streamed]


def _needed(sizes: Sequence[int], pinned: Sequence[int]) -> int:
    streamed = sorted(size for i, size in enumerate(sizes) if i not in set(pinned))
    return sum(sizes[i] for i in pinned) + sum(streamed[-_BUFFERS:])
