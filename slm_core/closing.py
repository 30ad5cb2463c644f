"""A base class of objects that own memory, files or sequences: ``with`` releases them, and nothing copies them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import NoReturn, Self


class Closing(ABC):
    """An object that is closed at the end of its ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse ``copy`` and ``pickle``: two objects would own the same."""
        raise TypeError(
            f"copy and pickle refuse a {type(self).__name__}, which owns memory or files: make another (chats, sessions"
            " and contexts have fork and dump)"
        )
