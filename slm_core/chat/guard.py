"""Keeps a second thread out of a chat."""

from __future__ import annotations

import threading
from types import TracebackType

from slm_core.errors import ChatBusy


class Guard:
    """A ``with`` block that one thread at a time may be inside of; the same thread may enter again.

    Entering raises ``ChatBusy`` at once if another thread is inside.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ChatBusy(
                "this chat is busy: another thread is inside a call (wait until it is over, or give each caller a fork"
                " of the chat)"
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()
