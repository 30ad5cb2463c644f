"""Writes GGUF files (version 3), tensor by tensor, so that a model need not fit into memory."""

from __future__ import annotations

import struct
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias, cast

import numpy as np

from slm_core.atomic_write import atomic_file
from slm_core.gguf.metadata import ValueType

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from slm_core.gguf.ggml_types import GgmlType

PlainValue: TypeAlias = "bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[float] | Sequence[str]"
"""A metadata value: a scalar, or a list of scalars of one type."""

_VERSION = 3
_ALIGNMENT = 32
_LENGTH = struct.Struct("<Q")
_ARRAY_TYPES = {"int32": ValueType.INT32, "float32": ValueType.FLOAT32}


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write.

    Attributes:
        name: its name, such as ``blk.0.attn_q.weight``.
        shape: rows first.
        ggml_type: the number format.
        n_bytes: the size of the packed blocks.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: GgmlType
    n_bytes: int


class GgufWriter:
    """Lays out a file, then takes the tensors' data in their order.

    Args:
        metadata: the stored value of each key (see ``Metadata.stored`` and ``stored_uint32``), in file order.
        tensors: the tensors, in file order.
        alignment: the alignment of tensor data, in bytes: ``general.alignment``, or 32.

    Attributes:
        header: all bytes before the tensors' data.
        size_bytes: the size of the whole file.
    """

    def __init__(self, metadata: Mapping[str, bytes], tensors: Sequence[NewTensor], alignment: int) -> None:
        self._alignment = alignment
        self._tensors = tensors
        self.header = self._padded_header(metadata)
        self.size_bytes = len(self.header) + sum(self._padded(tensor.n_bytes) for tensor in tensors)

    @contextmanager
    def open(self, path: Path) -> Iterator[TensorSink]:
        """Write the file atomically.

        A temporary file in the same folder replaces ``path`` when all data is on the disk.

        Raises:
            OSError: the file cannot be written.
        """
        with atomic_file(path) as file:
            file.write(self.header)
            sink = TensorSink(file, self._tensors, self._alignment)
            yield sink
            sink.finish()

    def _padded_header(self, metadata: Mapping[str, bytes]) -> bytes:
        parts = [struct.pack("<4sIQQ", b"GGUF", _VERSION, len(self._tensors), len(metadata))]
        parts += [_string(key) + value for key, value in metadata.items()]
        offset = 0
        for tensor in self._tensors:
            dims = tensor.shape[::-1]
            location = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.ggml_type, offset)
            parts.append(_string(tensor.name) + location)
            offset += self._padded(tensor.n_bytes)
        header = b"".join(parts)
        return header.ljust(self._padded(len(header)), b"\0")

    def _padded(self, n_bytes: int) -> int:
        return -(-n_bytes // self._alignment) * self._alignment


class TensorSink:
    """Writes the data of a file's tensors, in order, in pieces of any size that do not cross tensors."""

    def __init__(self, file: BinaryIO, tensors: Sequence[NewTensor], alignment: int) -> None:
        self._file = file
        self._alignment = alignment
        self._remaining = iter(tensors)
        self._left = 0

    def write(self, piece: NDArray[np.uint8]) -> None:
        """Append bytes of the current tensor: uint8 [n_bytes], C-contiguous.

        Raises:
            ValueError: the piece exceeds the tensor, or there are no more tensors.
        """
        if not self._left:
            tensor = next(self._remaining, None)
            self._left = 0 if tensor is None else tensor.n_bytes
        if piece.size > self._left:
            raise ValueError(f"{piece.size} bytes, but {self._left} are left of the tensor")
        self._file.write(piece.data)
        self._left -= piece.size
        if not self._left:
            self._file.write(bytes(-self._file.tell() % self._alignment))

    def finish(self) -> None:
        """Check that all data was written.

        Raises:
            ValueError: data is missing.
        """
        next_tensor = next(self._remaining, None)
        if self._left or next_tensor is not None:
            raise ValueError("the data of the last tensors is missing")


def stored_uint32(value: int) -> bytes:
    """The stored bytes of a 32-bit unsigned metadata value."""
    return struct.pack("<II", ValueType.UINT32, value)


def stored(value: PlainValue | NDArray[np.generic]) -> bytes:
    """A metadata value as stored in a file; the first item of a list gives the type of all items.

    An array is of int32 or float32.

    Raises:
        OverflowError, struct.error: a number out of range of a 32-bit unsigned integer or float.
    """
    if isinstance(value, (bool, int, float, str)):
        kind, raw = _scalar(value)
        return struct.pack("<I", kind) + raw
    if isinstance(value, np.ndarray):
        raw = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<")).tobytes()
        return struct.pack("<IIQ", ValueType.ARRAY, _ARRAY_TYPES[value.dtype.name], value.size) + raw
    kind, _ = _scalar(value[0])
    is_text = kind is ValueType.STRING  # types of strings are not checked one by one: vocabularies are long
    parts = map(_string, cast("Sequence[str]", value)) if is_text else (_scalar(item)[1] for item in value)
    return struct.pack("<IIQ", ValueType.ARRAY, kind, len(value)) + b"".join(parts)


def header(metadata: Mapping[str, PlainValue | NDArray[np.generic]]) -> bytes:
    """A whole file without tensors."""
    return GgufWriter({key: stored(value) for key, value in metadata.items()}, [], _ALIGNMENT).header


def _scalar(value: bool | float | str) -> tuple[ValueType, bytes]:
    if isinstance(value, str):
        return ValueType.STRING, _string(value)
    if isinstance(value, bool):
        return ValueType.BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return ValueType.UINT32, struct.pack("<I", value)
    return ValueType.FLOAT32, struct.pack("<f", value)


def _string(text: str) -> bytes:
    raw = text.encode()
    return _LENGTH.pack(len(raw)) + raw
