"""When and how the engine's thread wakes the readers of events.

A woken reader takes the GIL, and the engine's thread waits for it. If readers were woken after each token, a step with
16 requests would wait 16 times. So readers are woken when the next batch is about to be computed: they work while the
backend computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

from slm_core.errors import EngineClosed, SessionError

Waiter: TypeAlias = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Notified(Protocol):
    """Something with readers."""

    def notify(self) -> None:
        """Wake the readers."""
        ...


class Notifications:
    """Delays notifications of the engine's thread until ``flush``. Notifications of other threads are not delayed."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._holder: int | None = None
        self._delayed: dict[Notified, None] = {}

    @property
    def are_held(self) -> bool:
        """Whether notifications of this thread are delayed: whether it is the engine's thread."""
        return self._holder == threading.get_ident()

    def check_process(self) -> None:
        """Raise ``EngineClosed`` in a process that was forked: the engine's thread is not in it."""
        if self._process != os.getpid():
            raise EngineClosed("the engine was made before this process was forked; make it after the fork")

    def check_wait(self, what: str) -> None:
        """Raise ``SessionError`` in the engine's thread: if it waited for ``what``, it would wait for itself."""
        self.check_process()
        if self.are_held:
            raise SessionError(f"a callback of an engine cannot wait for {what}")

    def hold(self) -> None:
        """From now on, delay notifications of this thread."""
        self._holder = threading.get_ident()

    def add(self, notified: Notified) -> None:
        """Notify, now or at the next ``flush``."""
        if self.are_held:
            self._delayed[notified] = None
        else:
            notified.notify()

    def flush(self) -> None:
        """Send the delayed notifications."""
        delayed, self._delayed = self._delayed, {}
        for notified in delayed:
            notified.notify()

    def release(self) -> None:
        """Send the delayed notifications, and delay no more."""
        self._holder = None
        self.flush()


class Wakeups:
    """Sets futures of event loops in its own thread, because waking a loop is a system call that releases the GIL."""

    def __init__(self) -> None:
        self.begin_again()

    def begin_again(self) -> None:
        """Begin without a thread, as in a forked process, which lacks the thread of its parent."""
        self._waiters: SimpleQueue[Waiter] = SimpleQueue()
        self._start = threading.Lock()
        self._is_started = False

    def wake(self, waiters: Sequence[Waiter]) -> None:
        """Set futures soon. Any thread may call this; it does not wait."""
        for waiter in waiters:
            self._waiters.put(waiter)
        if waiters and not self._is_started:
            with self._start:
                if not self._is_started:
                    self._is_started = True
                    threading.Thread(target=self._serve, name="slm-engine-wakeups", daemon=True).start()

    def _serve(self) -> None:
        while True:
            futures = defaultdict(list)
            loop, future = self._waiters.get()
            futures[loop].append(future)
            with contextlib.suppress(Empty):
                while True:
                    loop, future = self._waiters.get_nowait()
                    futures[loop].append(future)
            for loop, each in futures.items():
                with contextlib.suppress(RuntimeError):  # the event loop is closed: no task waits
                    loop.call_soon_threadsafe(_set, each)


WAKEUPS = Wakeups()
"""The wakeups of this process."""
if sys.platform != "win32":  # Windows has no fork
    os.register_at_fork(after_in_child=WAKEUPS.begin_again)


def _set(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
