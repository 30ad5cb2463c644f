"""Keeps a second thread out of a session and out of a chat."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from slm_core.errors import SessionError
from slm_core.interrupts import uninterrupted


class Guard:
    """Blocks for one thread at a time; the same thread may enter again.

    Args:
        what: the name of the object in the error, such as "chat".
        busy: the class of the error.
    """

    def __init__(self, what: str, busy: type[SessionError]) -> None:
        self._lock = threading.RLock()
        self._what = what
        self._busy = busy

    def block(self) -> AbstractContextManager[object]:
        """The block, for a ``with`` statement: no interrupt comes between taking the lock and entering the block.

        Raises:
            The class ``busy``: another thread is inside. If it entered at the same moment, the block waits instead.
        """
        if threading.active_count() == 1:  # no other thread is inside, and delaying signals costs more than the lock
            return self._lock
        with uninterrupted:
            if not self._lock.acquire(blocking=False):
                raise self._busy(
                    f"this {self._what} is busy: another thread is inside a call (wait until it is over, or give each"
                    f" caller a fork of the {self._what})"
                )
            self._lock.release()
        return self._lock


class Guarded(Protocol):
    """An object whose calls exclude each other."""

    @property
    def _guard(self) -> Guard: ...


P = ParamSpec("P")
R = TypeVar("R")
Owner = TypeVar("Owner", bound=Guarded)


def one_thread(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """Make a method raise while another thread is inside a decorated method of the object; see ``Guard``."""

    @wraps(method)
    def guarded(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._guard.block():
            return method(self, *args, **kwargs)

    return guarded
