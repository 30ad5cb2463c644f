"""Lets one thread at a time call a context. Neither an interrupt nor the end of the program breaks off the call.

Python ends daemon threads where they return from native code after the end of the program. An engine in C++ does not
allow that: the process would abort. So the end waits for the calls that run, and no other thread begins one.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from slm_core.errors import ContextBusy
from slm_core.interrupts import uninterrupted

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()
_mutex = threading.Lock()
_program_ended = False


def lock_of_calls() -> threading.Lock:
    """A lock for ``one_call``; the end of the program waits until it is free."""
    lock = threading.Lock()
    with _mutex:
        _locks.add(lock)
    return lock


@contextmanager
def one_call(lock: threading.Lock, remedy: str = "use one context a thread") -> Iterator[None]:
    """A block for one thread at a time. Signal handlers are delayed until its end.

    Args:
        lock: the lock of the context.
        remedy: what a second thread should do, for the error.

    Raises:
        ContextBusy: another thread is inside.
        SystemExit: the program has ended, and this is not its main thread.
    """
    with uninterrupted:  # outside of the lock, which would stay locked if an interrupt came before its release
        if not lock.acquire(blocking=False):
            if _is_over():  # the end of the program has the lock
                raise SystemExit
            raise ContextBusy(f"another thread is inside a call of this context ({remedy})")
        try:
            if _is_over():
                raise SystemExit
            yield
        finally:
            lock.release()


def _is_over() -> bool:
    return _program_ended and threading.current_thread() is not threading.main_thread()


@atexit.register
def _wait_for_calls() -> None:
    global _program_ended
    _program_ended = True
    with _mutex:
        locks = tuple(_locks)
    for lock in locks:
        with lock:
            pass


def _forget_calls() -> None:
    """After a fork: forget the locks of the parent process, whose threads do not run here."""
    global _mutex
    _mutex = threading.Lock()
    _locks.clear()


if sys.platform != "win32":  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_calls)
