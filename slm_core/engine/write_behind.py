"""Background writing of kept sequences: the engine's thread dumps them between steps, another thread writes them."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slm_core.closing import Closing
from slm_core.engine.store import PrefixStore

_AHEAD = 4
"""The largest number of parts of dumps that wait for the disk."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    """A sequence to write; ``dump`` is None until its first part is requested."""

    seq_id: int
    tokens: NDArray[np.int32]
    salt: str
    dump: Iterator[bytes] | None = None
    abandoned: bool = False
    saved: Future[bool] = field(default_factory=Future)


class _Abandoned(Exception):
    """A sequence was reused or dropped before its dump was complete."""


class WriteBehind(Closing):
    """Writes kept sequences, in order, one part of a dump at each ``advance``.

    Args:
        store: stores the dumps.
        dump: returns the parts of a sequence's dump.
    """

    def __init__(self, store: PrefixStore, dump: Callable[[int], Iterator[bytes]]) -> None:
        self._store = store
        self._dump = dump
        self._jobs: deque[_Job] = deque()  # dumps that are not complete
        self._lock = threading.Lock()
        self._unfinished: set[Future[bool]] = set()
        # A part None ends a job; an item None ends the thread.
        self._queue: queue.Queue[tuple[_Job, bytes | None] | None] = queue.Queue(_AHEAD)
        self._thread = threading.Thread(target=self._write, name="slm-prefix-writer", daemon=True)
        self._thread.start()

    @property
    def is_reading(self) -> bool:
        """Whether any dump is not complete."""
        return bool(self._jobs)

    def add(self, seq_id: int, tokens: NDArray[np.int32], salt: str) -> Future[bool]:
        """Write a kept sequence; the result of the future is whether it is on disk."""
        job = _Job(seq_id, tokens, salt)
        with self._lock:
            self._unfinished.add(job.saved)
        self._jobs.append(job)
        return job.saved

    def forget(self, seq_id: int) -> None:
        """Stop writing a sequence that is reused or dropped, unless its dump is complete."""
        for job in [job for job in self._jobs if job.seq_id == seq_id]:
            self._jobs.remove(job)
            self._abandon(job)

    def advance(self, *, wait: bool) -> None:
        """Dump one part of the oldest sequence. If the queue to the writer is full, ``wait`` for it or do nothing.

        Raises:
            SlmError: the context refuses the dump, which is abandoned.
        """
        job = self._jobs[0]
        if self._queue.full() and not wait:
            return
        try:
            if job.dump is None:
                job.dump = self._dump(job.seq_id)
            part = next(job.dump, None)
        except BaseException:
            self._jobs.popleft()
            self._abandon(job)
            raise
        if part is None:
            self._jobs.popleft()
        self._queue.put((job, part))

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all sequences added so far are written or abandoned; returns False on a timeout.

        Another thread has to call ``advance`` meanwhile.
        """
        with self._lock:
            unfinished = tuple(self._unfinished)
        return not wait(unfinished, timeout).not_done

    def close(self) -> None:
        """Abandon incomplete dumps, and wait for the writer. A second call does nothing."""
        while self._jobs:
            self._abandon(self._jobs.popleft())
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _abandon(self, job: _Job) -> None:
        if job.dump is None:
            self._done(job, saved=False)
            return
        job.abandoned = True
        self._queue.put((job, None))

    def _done(self, job: _Job, *, saved: bool) -> None:
        with self._lock:
            self._unfinished.discard(job.saved)
        job.saved.set_result(saved)

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            job, part = item
            parts, saved = self._parts(part), False
            try:
                saved = self._store.add(job.tokens, job.salt, parts)
            except _Abandoned:
                pass
            except Exception:  # the thread must not end: ``flush`` waits for it
                _log.exception("a prefix is not written")
            with contextlib.suppress(_Abandoned):
                for _ in parts:  # parts that the store did not read
                    pass
            self._done(job, saved=saved)

    def _parts(self, part: bytes | None) -> Iterator[bytes]:
        """The parts of a job: ``part``, then parts from the queue. None ends a job, also an abandoned one."""
        while part is not None:
            yield part
            item = self._queue.get()
            assert item is not None, "a job ends before the writer does"
            job, part = item
            if part is None and job.abandoned:
                raise _Abandoned
