"""A base class of objects that own memory, files or sequences: ``with`` releases them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """An object that is closed at the end of its ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
