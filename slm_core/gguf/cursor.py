"""A mapped model file, and a bounds-checked cursor."""

from __future__ import annotations

import mmap
import stat
import struct
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from slm_core.errors import InvalidModelFile, ModelClosed, ModelFileNotFound, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

MAX_ITEMS = 2**23
"""The largest number of strings and nested arrays in one file: ten times the largest known vocabulary."""


def shown(text: str) -> str:
    """Quote a name for an error message: one printable line of at most 80 characters."""
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}..."


class MappedFile:
    """One regular file, mapped read-only.

    The mapping is released when the file is closed and its last view is deleted. If another program truncates a mapped
    file, the system stops the process: replace model files, never rewrite them.

    Args:
        path: the file.
        wanted: the expected kind of file, for messages.

    Attributes:
        path: the path of the file.
        size: the size of the file, in bytes.
    """

    def __init__(self, path: Path, wanted: str = "a GGUF file") -> None:
        self.path = path
        try:
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode):  # before opening it, because opening a pipe would wait for a writer
                kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
                remedy = f" (slm convert {path} model.gguf --to gguf writes one)" if is_checkpoint(path) else ""
                raise InvalidModelFile(f"{path}: {kind}, but {wanted} is wanted{remedy}")
            with path.open("rb") as file:
                # Map the present size, so that the mapping equals self.size even if the file grows or shrinks.
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise InvalidModelFile(f"{path}: the file is empty")
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelFileNotFound(f"{path}: no such file") from None
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
        """Turn off read-ahead inside the block: the system could read megabytes around each page.

        Windows takes no such advice, and reads ahead.
        """
        if sys.platform == "win32":
            yield
            return
        data = self.data
        data.madvise(mmap.MADV_RANDOM)
        try:
            yield
        finally:
            data.madvise(mmap.MADV_NORMAL)

    def stated_fingerprint(self) -> None:
        """None: the fingerprint is computed from the content."""

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The content of the whole file."""
        yield memoryview(self.data)

    def close(self) -> None:
        """Release the mapping; existing views keep it alive."""
        data, self._map = self._map, None
        if data is not None:
            # Unmap now, even if an exception refers to the mapping: Windows cannot replace or remove a mapped file.
            with suppress(BufferError):
                data.close()


class HeldBytes:
    """Bytes in memory instead of a file.

    Args:
        data: the bytes.
        path: the path in messages.

    Attributes:
        path: the path in messages.
        size: the number of bytes.
    """

    def __init__(self, data: bytes, path: Path = Path("<bytes>")) -> None:
        self.path = path
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
        """Nothing to do: all bytes are in memory."""
        yield

    def stated_fingerprint(self) -> str | None:
        """None: the fingerprint is computed from the content."""
        return None

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The content of the whole file."""
        yield self.data

    def close(self) -> None:
        """Release the bytes; existing views keep them alive."""
        self._data = None


FileData: TypeAlias = MappedFile | HeldBytes
"""The data of a model file."""


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
        """An error about this file, for the caller to raise."""
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
        """Read the number of items, and check that the file has room for items of at least ``min_bytes`` each."""
        start = self.offset
        n = self.u64(what)
        if n * min_bytes > self.left:
            raise self.damaged(
                f"byte {start}: {what} is {n}, but {self.left} bytes are left and each takes {min_bytes} at least"
            )
        return n

    def spend(self, n: int, what: str) -> None:
        """Add ``n`` strings or arrays to the count of items in this file.

        Raises:
            UnsupportedModel: the count exceeds ``MAX_ITEMS``.
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
        """Read a string; bytes that are not UTF-8 become lone surrogates (PEP 383)."""
        n_bytes = self.u64(f"length of {what}")
        at = self.skip(n_bytes, what)
        return self.data[at : at + n_bytes].decode("utf-8", "surrogateescape")

    def skip_texts(self, n: int, what: str) -> None:
        """Move past ``n`` strings. The loop calls no functions, because it runs over a whole vocabulary."""
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
        """Read ``n`` strings that ``skip_texts`` has checked."""
        data, offset, unpack = self.data, self.offset, _U64.unpack_from
        texts = []
        for _ in range(n):
            start = offset + 8
            offset = start + unpack(data, offset)[0]
            texts.append(data[start:offset].decode("utf-8", "surrogateescape"))
        self.offset = offset
        return texts


def is_checkpoint(folder: Path) -> bool:
    """Whether a directory contains a Hugging Face model."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
