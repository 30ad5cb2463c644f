"""Work of the main thread that no signal handler breaks off half-way, and interrupts that came meanwhile.

Python runs signal handlers in the main thread, between any two instructions. If a handler raised (Ctrl-C) in the middle
of a message, the connection would be unusable. So another thread sends and receives, and the main thread waits.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_SOON_S = 0.02


class _Job(Generic[T]):
    """A function, and its result when it has run."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._result: T | None = None
        self._error: BaseException | None = None
        self._has_run = False
        self.is_over = threading.Lock()
        self.is_over.acquire()

    def run(self) -> None:
        """Run the function once, even if the job was queued twice."""
        if not self._has_run:
            try:
                self._result = self._work()
            except BaseException as error:  # raised again in the main thread
                self._error = error
            self._has_run = True
        if self.is_over.locked():
            self.is_over.release()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # T may include None


class _Courier:
    """A thread that runs jobs of the main thread; started when first used, and again in a forked process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any]] | None = None

    def put(self, job: _Job[Any]) -> None:
        if self._jobs is None:
            jobs: queue.SimpleQueue[_Job[Any]] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(jobs,), name="slm-isolation", daemon=True).start()
            self._jobs = jobs
        self._jobs.put(job)

    def forget(self) -> None:
        self._jobs = None

    @staticmethod
    def _run(jobs: queue.SimpleQueue[_Job[Any]]) -> None:
        while True:
            job = jobs.get()
            job.run()
            del job  # it refers to arrays


_courier = _Courier()
if sys.platform != "win32":  # Windows has no fork
    os.register_at_fork(after_in_child=_courier.forget)


def uninterrupted(
    work: Callable[[], T], give_up: Callable[[], None], *, at_once: bool = False
) -> tuple[T, BaseException | None]:
    """Run ``work`` to its end; returns its result, and the interrupt that came meanwhile, if any.

    Args:
        work: the work.
        give_up: makes ``work`` end early. It is called at the second interrupt, and at any other exception of a signal
            handler.
        at_once: whether it is called at the first interrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        return work(), None
    job, interrupt = _Job(work), None
    while True:
        try:
            _courier.put(job)  # again after an interrupt, which may have come before
            job.is_over.acquire()
            break
        except BaseException as error:
            if at_once or interrupt is not None or not isinstance(error, KeyboardInterrupt):
                give_up()
            interrupt = error
    try:
        return job.result(), interrupt
    except Exception:
        if interrupt is not None:
            raise interrupt from None
        raise


class _Postponed:
    """An interrupt that came during a call that succeeded.

    The call returns its result, as a call that raises must not change anything. The next call raises the interrupt
    instead; if there is none soon, the main thread gets it again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_due = False

    def postpone(self) -> None:
        """Raise the interrupt soon."""
        self._is_due = True
        timer = threading.Timer(_SOON_S, self._send)
        timer.daemon = True
        timer.start()

    def raise_due(self) -> None:
        """Raise the interrupt if it is due, in the main thread."""
        if self._is_due and threading.current_thread() is threading.main_thread() and self._take():
            raise KeyboardInterrupt

    def _take(self) -> bool:
        with self._lock:
            is_due, self._is_due = self._is_due, False
        return is_due

    def _send(self) -> None:
        if sys.platform == "win32":
            raise AssertionError("`isolated` refuses Windows")
        if self._take():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


postponed = _Postponed()
