"""A pointer of llama.cpp that is freed once, when no call uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slm_core.errors import ModelClosed


class Handle:
    """The pointer to a model or an adapter.

    Args:
        pointer: llama.cpp's pointer.
        free: frees it.
        name: name for error messages.
    """

    def __init__(self, pointer: int, free: Callable[[int], None], name: str) -> None:
        self._pointer: int | None = pointer
        self._free = free
        self._name = name
        self._retired = False
        self._users = 0
        self._idle = threading.Condition()

    @contextmanager
    def use(self) -> Iterator[int]:
        """The pointer, valid while the ``with`` block runs.

        Raises:
            ModelClosed: the pointer is freed, or about to be freed.
        """
        with self._idle:
            if self._retired or self._pointer is None:
                raise ModelClosed(f"the model {self._name} is closed")
            pointer = self._pointer
            self._users += 1
        try:
            yield pointer
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    def retire(self) -> None:
        """Refuse new users, and wait until the current ones are done."""
        with self._idle:
            self._retired = True
            self._idle.wait_for(lambda: self._users == 0)

    def free(self) -> None:
        """Free the pointer; a second call does nothing."""
        with self._idle:
            pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self._free(pointer)
