"""The queue of a context: threads that use one context take turns, first come, first served.

A context refuses a second thread with ``ContextBusy``. Sessions and chats wait here instead.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from types import TracebackType

from slm_core.errors import ContextBusy, InvalidOption
from slm_core.interrupts import uninterrupted, wait_s
from slm_core.numerics import as_finite, shown
from slm_core.protocols import Context

DEADLINE_S = 300.0
"""Seconds that a call waits for its turn by default."""


class ContextQueue:
    """A lock that serves threads in the order in which they came; a ``with`` block holds it.

    The thread that holds the lock may enter again. Ctrl-C ends a wait. The block is an ``uninterrupted`` one: an
    interrupt at its end could leave the lock to a thread that is no longer inside.

    Attributes:
        deadline_s: seconds after which a wait raises ``ContextBusy``; infinity waits without end.
    """

    def __init__(self) -> None:
        self.deadline_s = DEADLINE_S
        self._mutex = threading.Lock()
        self._holder: int | None = None
        self._depth = 0
        self._waiting: deque[_Place] = deque()

    @property
    def n_waiting(self) -> int:
        """The number of threads that wait."""
        return len(self._waiting)

    def __enter__(self) -> None:
        uninterrupted.__enter__()
        try:
            self._acquire()
        except BaseException as error:
            uninterrupted.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._release()
        finally:
            uninterrupted.__exit__(kind, error, at)

    def _acquire(self) -> None:
        thread = threading.get_ident()
        with self._mutex:
            if self._holder in (None, thread):
                self._holder = thread
                self._depth += 1
                return
            place = _Place(thread)
            self._waiting.append(place)
        try:
            with uninterrupted.paused():
                in_time = place.wait(self.deadline_s)
        except BaseException:
            self._leave(place)
            raise
        if not in_time:
            self._leave(place)
            raise ContextBusy(
                f"another thread used this context for {self.deadline_s:g} seconds: give each thread a context of its"
                " own, or wait longer (queue_timeout=)"
            )

    def _release(self) -> None:
        with self._mutex:
            self._depth -= 1
            if self._depth == 0:
                self._pass_on()

    def _leave(self, place: _Place) -> None:
        """Give up a place, or the turn, if it has come meanwhile."""
        with self._mutex:
            if place in self._waiting:
                self._waiting.remove(place)
            else:
                self._depth = 0
                self._pass_on()

    def _pass_on(self) -> None:
        """Give the lock to the thread that came first: without an order, a thread that decodes could starve others."""
        self._holder = None
        if self._waiting:
            place = self._waiting.popleft()
            self._holder, self._depth = place.thread, 1
            place.call()


class _Place:
    """A thread's place in the queue."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self._gate = threading.Lock()
        self._gate.acquire()

    def call(self) -> None:
        """End the wait: the turn has come."""
        self._gate.release()

    def wait(self, seconds: float) -> bool:
        """Whether the turn came in time."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            if self._gate.acquire(timeout=min(max(left, 0), wait_s() or threading.TIMEOUT_MAX)):
                return True
            if left <= 0:
                return False


_queues: weakref.WeakKeyDictionary[Context, ContextQueue] = weakref.WeakKeyDictionary()
_queues_lock = threading.Lock()


def queue_of(context: Context) -> ContextQueue:
    """The queue of a context, which all its sessions share."""
    with _queues_lock:
        return _queues.setdefault(context, ContextQueue())


def checked_deadline(seconds: float) -> float:
    """The deadline, if it is a number above 0; infinity is one.

    Raises:
        InvalidOption: the deadline is invalid.
    """
    number = seconds if isinstance(seconds, float) and seconds == math.inf else as_finite(seconds)
    if number is None or number <= 0:
        raise InvalidOption(f"queue_timeout={shown(seconds)} (accepted: seconds above 0; math.inf waits without end)")
    return number
