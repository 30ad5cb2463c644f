"""A model file in memory, and a bounds-checked way through it."""

from __future__ import annotations

import mmap
import stat
import struct
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from slm_core.errors import InvalidModelFile, ModelClosed, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

MAX_ITEMS = 2**23
"""Strings and nested arrays in one file: ten times the largest known vocabulary, walked in seconds at the worst."""


def shown(text: str) -> str:
    """Quote a name for an error message: one line, printable, at most 80 characters of it."""
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}..."


class MappedFile:
    """One regular file, mapped read-only.

    The mapping is returned to the system as soon as it is closed and the last view of it is gone. A file that another
    program truncates while it is mapped makes the system stop the process: replace model files, never rewrite them.

    Args:
        path: the file.
        wanted: the expected value, for messages.

    Attributes:
        path: the path as it was given.
        size: bytes.
    """

    def __init__(self, path: Path, wanted: str = "a GGUF file") -> None:
        self.path = path
        try:
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode):  # checked before it is opened: opening a pipe would wait for a writer
                kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
                raise InvalidModelFile(f"{path}: {kind}, but {wanted} is wanted")
            with path.open("rb") as file:
                # Mapped by its size now, so that a file that grows or shrinks meanwhile cannot differ from self.size.
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise InvalidModelFile(f"{path}: the file is empty")
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise InvalidModelFile(f"{path}: no such file") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or a file that shrank
            reason = getattr(error, "strerror", None) or error
            raise InvalidModelFile(f"{path}: cannot be read: {reason}") from None

    @property
    def data(self) -> mmap.mmap:
        """The whole file as a buffer.

        Raises:
            ModelClosed: after ``close()``.
        """
        if self._map is None:
            raise ModelClosed(f"{self.path}: the file is closed")
        return self._map

    def view(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        """``n_bytes`` of the file from ``offset`` as a read-only array that shares the mapping."""
        return np.frombuffer(self.data, np.uint8, n_bytes, offset)

    @contextmanager
    def scattered_reads(self) -> Iterator[None]:
        """Keep the system from reading ahead meanwhile: around each page touched it may fetch megabytes."""
        data = self.data
        data.madvise(mmap.MADV_RANDOM)
        try:
            yield
        finally:
            data.madvise(mmap.MADV_NORMAL)

    def close(self) -> None:
        """Let go of the mapping; views that are still held keep it alive until they are gone."""
        self._map = None


class HeldBytes:
    """Bytes in memory in the place of a file.

    Attributes:
        path: the path in messages.
        size: bytes.
    """

    def __init__(self, data: bytes) -> None:
        self.path = Path("<bytes>")
        self.size = len(data)
        if not data:
            raise InvalidModelFile(f"{self.path}: there are none")
        self._data: bytes | None = data

    @property
    def data(self) -> bytes:
        """The bytes.

        Raises:
            ModelClosed: after ``close()``.
        """
        if self._data is None:
            raise ModelClosed(f"{self.path}: the file is closed")
        return self._data

    def view(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        """``n_bytes`` from ``offset`` as a read-only array that shares the memory."""
        return np.frombuffer(self.data, np.uint8, n_bytes, offset)

    @contextmanager
    def scattered_reads(self) -> Iterator[None]:
        """Nothing is read ahead: all of it is here."""
        yield

    def close(self) -> None:
        """Let go of the bytes; views that are still held keep them."""
        self._data = None


FileData: TypeAlias = MappedFile | HeldBytes
"""What a model file is read from."""


class Cursor:
    """A position in a mapped file that never passes the end.

    Attributes:
        data: the file.
        offset: the position, in bytes from the start of the file.
        size: the file's size.
    """

    __slots__ = ("_items_left", "data", "offset", "path", "size")

    def __init__(self, file: FileData, offset: int = 0) -> None:
        self.path = file.path
        self.data = file.data
        self.size = file.size
        self.offset = offset
        self._items_left = MAX_ITEMS

    @property
    def left(self) -> int:
        """Bytes between the position and the end of the file."""
        return self.size - self.offset

    def damaged(self, message: str) -> InvalidModelFile:
        """An error about this file, to be raised by the caller."""
        return InvalidModelFile(f"{self.path}: {message}")

    def skip(self, n_bytes: int, what: str) -> int:
        """Move past ``n_bytes`` and return their start.

        Raises:
            InvalidModelFile: the file ends before that.
        """
        if n_bytes > self.left:
            raise self.damaged(
                f"truncated at byte {self.offset}: {what} needs {n_bytes} bytes, the file has {self.left} left"
            )
        start = self.offset
        self.offset += n_bytes
        return start

    def u32(self, what: str) -> int:
        """Read an unsigned 32-bit integer."""
        value: int = _U32.unpack_from(self.data, self.skip(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        """Read an unsigned 64-bit integer."""
        value: int = _U64.unpack_from(self.data, self.skip(8, what))[0]
        return value

    def count(self, what: str, min_bytes: int) -> int:
        """Read how many items follow, and check that the file has room for items of at least ``min_bytes`` each."""
        start = self.offset
        n = self.u64(what)
        if n * min_bytes > self.left:
            raise self.damaged(
                f"byte {start}: {what} is {n}, but {self.left} bytes are left and each takes {min_bytes} at least"
            )
        return n

    def spend(self, n: int, what: str) -> None:
        """Count ``n`` strings or arrays, to be walked one by one, against what one file may have.

        Raises:
            UnsupportedModel: that makes more than ``MAX_ITEMS``.
        """
        self._items_left -= n
        if self._items_left < 0:
            raise UnsupportedModel(f"{self.path}: more than {MAX_ITEMS} strings and arrays in the metadata (at {what})")

    def name(self, what: str, max_bytes: int) -> str:
        """Read a string that must be valid UTF-8 of at most ``max_bytes``."""
        start = self.offset
        n_bytes = self.u64(f"length of a {what}")
        if n_bytes > max_bytes:
            raise self.damaged(f"byte {start}: a {what} of {n_bytes} bytes (at most {max_bytes})")
        at = self.skip(n_bytes, what)
        try:
            return self.data[at : at + n_bytes].decode()
        except UnicodeDecodeError:
            raise self.damaged(f"byte {start}: a {what} is not valid UTF-8") from None

    def text(self, what: str) -> str:
        """Read a string whose bytes that are not UTF-8 become lone surrogates (PEP 383)."""
        n_bytes = self.u64(f"length of {what}")
        at = self.skip(n_bytes, what)
        return self.data[at : at + n_bytes].decode("utf-8", "surrogateescape")

    def skip_texts(self, n: int, what: str) -> None:
        """Move past ``n`` strings. This loop runs over a whole vocabulary, so it calls no functions."""
        data, offset, unpack = self.data, self.offset, _U64.unpack_from
        try:
            for _ in range(n):
                offset += 8 + unpack(data, offset)[0]
        except (struct.error, OverflowError):
            offset = self.size + 1
        if offset > self.size:
            raise self.damaged(f"truncated: the {n} strings of {what} from byte {self.offset} pass the end of the file")
        self.offset = offset

    def texts(self, n: int) -> list[str]:
        """Read ``n`` strings that ``skip_texts`` has been over."""
        data, offset, unpack = self.data, self.offset, _U64.unpack_from
        texts = []
        for _ in range(n):
            start = offset + 8
            offset = start + unpack(data, offset)[0]
            texts.append(data[start:offset].decode("utf-8", "surrogateescape"))
        self.offset = offset
        return texts
