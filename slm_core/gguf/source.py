"""The interface of model sources: a GGUF file, or an object that behaves like one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from slm_core.gguf.metadata import Metadata
    from slm_core.gguf.tensors import TensorInfo

T = TypeVar("T")
D = TypeVar("D")


class WeightSource(Protocol):
    """Metadata and tensors by their GGUF names; see ``GgufFile``, which presents a user's ``TensorSource`` this way."""

    @property
    def path(self) -> Path:
        """The path, for messages."""
        ...

    @property
    def metadata(self) -> Metadata:
        """The key-value pairs."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and type of each tensor, by name."""
        ...

    @property
    def is_mapped(self) -> bool:
        """Whether ``tensor_data`` returns views of mapped files, whose pages are read when they are used."""
        ...

    def require(self, key: str, type_: type[T]) -> T:
        """The metadata value of ``key``, strictly typed."""
        ...

    def get(self, key: str, type_: type[T], default: D) -> T | D:
        """The metadata value of ``key``, strictly typed, or ``default`` if there is none."""
        ...

    def tensor_data(self, name: str) -> NDArray[np.uint8]:
        """A tensor's packed blocks, uint8 ``[n_bytes]``, read-only; a view of the file if it stores the same blocks.

        Raises:
            UnsupportedModel: there is no such tensor.
            InvalidModelFile: it cannot be read.
            ModelClosed: after ``close()``.
        """
        ...

    def fingerprint(self) -> str:
        """A digest of the content, independent of path and date: 64 hexadecimal digits."""
        ...

    def close(self) -> None:
        """Release the files. A second call does nothing."""
        ...
