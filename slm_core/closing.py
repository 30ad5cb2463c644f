"""What holds memory, a file or a place in a context: ``with`` lets go of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Closed where its ``with`` block is left."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what it holds. Twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
