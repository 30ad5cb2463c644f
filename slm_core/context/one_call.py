"""One call of a context at a time, which no interrupt breaks off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from slm_core.errors import ContextBusy
from slm_core.interrupts import uninterrupted


@contextmanager
def one_call(lock: threading.Lock, remedy: str = "use one context a thread") -> Iterator[None]:
    """A block that one thread at a time may be inside of, in which handlers of signals wait.

    Args:
        lock: the lock of the context.
        remedy: what a second thread should do, for the error.

    Raises:
        ContextBusy: another thread is inside.
    """
    with uninterrupted:  # outside of the lock, which would stay locked if an interrupt came before its release
        if not lock.acquire(blocking=False):
            raise ContextBusy(f"another thread is inside a call of this context ({remedy})")
        try:
            yield
        finally:
            lock.release()
