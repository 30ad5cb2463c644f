"""A ``TensorSource`` laid out as a GGUF file: the header is in memory, tensors are read when they are used."""

from __future__ import annotations

import math
import operator
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slm_core.errors import InvalidModelFile
from slm_core.foreign import one_line
from slm_core.gguf.cursor import Cursor, HeldBytes, shown
from slm_core.gguf.ggml_types import GgmlType
from slm_core.gguf.metadata import Metadata
from slm_core.gguf.writer import GgufWriter, NewTensor, stored

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slm_core.tensor_source import TensorSource

_ALIGNMENT = 32
_LEAST_ALIGNMENT = 8
"""The alignment of addresses that kernels rely on: the least of GGUF files."""
_LAYOUT_KEYS = frozenset({"general.alignment", "split.no", "split.count", "split.tensors.count"})
_MOST_DIMS, _MOST_ELEMENTS = 4, 2**63 - 1  # as in files
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_BEFORE_PAIRS, _LENGTH_BYTES = 24, 8
"""Bytes of a header before its metadata (magic, version, numbers of tensors and pairs), and of the length of a key."""


class SourceFile(HeldBytes):
    """The file that a source would be. Whatever the source returns is checked against the header.

    Args:
        source: the source; it is never closed.

    Raises:
        InvalidModelFile: the source raises, or no model can have its metadata or tensors.
    """

    def __init__(self, source: TensorSource) -> None:
        path = Path(f"<{re.sub(r'[^A-Za-z0-9_]', '_', type(source).__name__)[:80]}>")
        values = _stored_metadata(path, source)
        tensors = _new_tensors(path, source)
        header = GgufWriter(values, tensors, _ALIGNMENT)
        super().__init__(header.header, path)
        self.size = header.size_bytes
        self._tensors = dict(zip(_offsets(len(header.header), tensors), tensors, strict=True))
        self._source: TensorSource | None = source
        self._lock = threading.Lock()  # a source need not be thread-safe

    def stated_fingerprint(self) -> str:
        """The fingerprint that the source states.

        Raises:
            InvalidModelFile: the source raises, or the value is not a fingerprint.
        """
        source = self._open_source()
        with self._lock, _reading(f"{self.path}: the fingerprint"):
            fingerprint = source.fingerprint()
        if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
            value = shown(fingerprint) if isinstance(fingerprint, str) else _kind(fingerprint)
            raise InvalidModelFile(
                f"{self.path}: fingerprint() returned {value} (accepted: 64 lower-case hexadecimal digits)"
            )
        return fingerprint

    def view(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        """The blocks of the tensor at ``offset``, or ``n_bytes`` of the header.

        Raises:
            InvalidModelFile: the source raises, or returns something else than the tensor's blocks.
        """
        source = self._open_source()
        if offset not in self._tensors:
            return super().view(offset, n_bytes)
        tensor = self._tensors[offset]
        what = f"{self.path}: tensor {shown(tensor.name)}"
        with self._lock, _reading(what):
            data = source.tensor_data(tensor.name)
        return _blocks(what, data, tensor.n_bytes)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The content of the whole file."""
        yield self.data
        for offset, tensor in self._tensors.items():
            yield self.view(offset, tensor.n_bytes).data
            yield bytes(-tensor.n_bytes % _ALIGNMENT)

    def close(self) -> None:
        """Forget the source."""
        super().close()
        self._source = None

    def _open_source(self) -> TensorSource:
        source, _ = self._source, self.data  # ``data`` raises after ``close``
        assert source is not None
        return source


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Convert the exceptions of a source; the block contains nothing else."""
    try:
        yield
    except Exception as error:
        raise InvalidModelFile(f"{what} cannot be read: {type(error).__name__}: {one_line(error)}") from error


def _stored_metadata(path: Path, source: TensorSource) -> dict[str, bytes]:
    """The stored value of each key.

    Raises:
        InvalidModelFile: the source raises, or GGUF cannot store a key or a value.
    """
    with _reading(f"{path}: metadata"):
        metadata: object = source.metadata
        if isinstance(metadata, Metadata):
            pairs: dict[object, object] = {key: metadata.stored(key) for key in metadata}
        else:
            pairs = _pairs(metadata)
    values = {}
    for key, value in pairs.items():
        if not isinstance(key, str):
            raise InvalidModelFile(f"{path}: a metadata key is {_kind(key)} (accepted: str)")
        if key not in _LAYOUT_KEYS:
            values[key] = value if isinstance(value, bytes) else _stored_value(path, key, value)
    _check_stored(path, values)
    return values


def _stored_value(path: Path, key: str, value: object) -> bytes:
    try:
        return stored(value)  # type: ignore[arg-type]  # any other type raises
    except Exception as error:  # of user-defined sequences, too
        raise InvalidModelFile(
            f"{path}: metadata {shown(key)} is {_kind(value)}, which cannot be stored: {one_line(error)} (accepted:"
            " bool, int, float, str, lists of one of them, arrays of int32 or float32, stored bytes)"
        ) from None


def _check_stored(path: Path, values: Mapping[str, bytes]) -> None:
    """Check that readers will find these values, and nothing else: stored bytes could contain several pairs."""
    try:
        data = HeldBytes(GgufWriter(values, [], _ALIGNMENT).header, path)
    except UnicodeEncodeError as error:
        raise InvalidModelFile(f"{path}: a metadata key is not text: {one_line(error)}") from None
    cursor = Cursor(data)
    cursor.skip(_BEFORE_PAIRS, "the header")
    names = list(Metadata(cursor, len(values), data))
    end = _BEFORE_PAIRS + sum(_LENGTH_BYTES + len(key.encode()) + len(value) for key, value in values.items())
    if names != list(values) or cursor.offset != end:
        raise InvalidModelFile(f"{path}: the stored bytes of a metadata value are damaged")


def _new_tensors(path: Path, source: TensorSource) -> list[NewTensor]:
    with _reading(f"{path}: tensors"):
        pairs = _pairs(source.tensors)
    tensors = [_new_tensor(path, name, value) for name, value in pairs.items()]
    if (n_bytes := sum(tensor.n_bytes for tensor in tensors)) > _MOST_ELEMENTS:
        raise InvalidModelFile(f"{path}: the tensors take {n_bytes} bytes (accepted: up to {_MOST_ELEMENTS})")
    return tensors


def _new_tensor(path: Path, name: object, value: object) -> NewTensor:
    if not isinstance(name, str):
        raise InvalidModelFile(f"{path}: the name of a tensor is {_kind(name)} (accepted: str)")
    what = f"{path}: tensor {shown(name)}"
    try:
        name.encode()
        shape, ggml_type = _shape_and_type(value)
    except Exception as error:  # of user-defined sequences, too
        raise InvalidModelFile(
            f"{what}: {one_line(error)} (accepted: a shape and a type, such as ((64, 32), GgmlType.Q8_0))"
        ) from None
    if min(shape) < 1 or math.prod(shape) > _MOST_ELEMENTS:
        raise InvalidModelFile(f"{what} has an impossible shape (accepted: 1 to {_MOST_ELEMENTS} weights)")
    if shape[-1] % ggml_type.block_size:
        raise InvalidModelFile(
            f"{what} has rows of {shape[-1]}, not a whole number of blocks of {ggml_type.block_size} ({ggml_type.name})"
        )
    return NewTensor(name, shape, ggml_type, math.prod(shape) // ggml_type.block_size * ggml_type.block_bytes)


def _shape_and_type(value: Any) -> tuple[tuple[int, ...], GgmlType]:
    dims, type_id = value
    if not isinstance(dims, Sequence) or not 1 <= len(dims) <= _MOST_DIMS:
        raise TypeError(f"the shape is not a list of 1 to {_MOST_DIMS} sizes")
    return tuple(map(operator.index, dims)), GgmlType(type_id)


def _pairs(mapping: object) -> dict[object, object]:
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{_kind(mapping)} is not a mapping")
    return dict(mapping.items())


def _offsets(start: int, tensors: Sequence[NewTensor]) -> Iterator[int]:
    """The offset of each tensor, as ``GgufWriter`` lays them out."""
    for tensor in tensors:
        yield start
        start += -(-tensor.n_bytes // _ALIGNMENT) * _ALIGNMENT


def _blocks(what: str, data: object, n_bytes: int) -> NDArray[np.uint8]:
    """The value that a source returned, as a read-only array, uint8 [n_bytes]; a view if the address allows it."""
    try:
        view = memoryview(data)  # type: ignore[arg-type]  # any other type raises
        is_bytes = view.format in ("B", "b", "c") and view.c_contiguous
    except Exception:  # of user-defined buffers, too
        is_bytes = False
    if not is_bytes:
        kind = f"an array of {data.dtype}" if isinstance(data, np.ndarray) else _kind(data)
        raise InvalidModelFile(f"{what}: tensor_data() returned {kind} (accepted: bytes, or contiguous uint8)")
    if view.nbytes != n_bytes:
        raise InvalidModelFile(f"{what}: tensor_data() returned {view.nbytes} bytes (accepted: {n_bytes})")
    blocks = np.frombuffer(view, np.uint8)
    if blocks.ctypes.data % _LEAST_ALIGNMENT:
        blocks = blocks.copy()
    blocks.flags.writeable = False
    return blocks


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
