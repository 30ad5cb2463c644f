"""Typed metadata, parsed when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf.cursor import Cursor, shown

if TYPE_CHECKING:
    from slm_core.gguf.cursor import FileData

MetadataValue: TypeAlias = "bool | int | float | str | NDArray[Any] | list[str] | list[MetadataValue]"
"""A scalar, a string, an array of numbers (a new NumPy array), of strings, or of arrays (a list)."""

OWN = "slm."
"""Prefix of keys that are not part of GGUF: properties of configurations that have no key there."""

T = TypeVar("T")
D = TypeVar("D")

MAX_ARRAY_DEPTH = 8
MAX_KEY_BYTES = 65535  # the specification's limit
_MIN_STRING_BYTES = 8
_MIN_ARRAY_BYTES = 12
MIN_PAIR_BYTES = _MIN_STRING_BYTES + 4 + 1


class ValueType(IntEnum):
    """The type ids of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_SCALARS: dict[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("<?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}


class Metadata(Mapping[str, MetadataValue]):
    """The key-value pairs of one file, in file order.

    Everything is checked when the file is opened, but nothing is copied: a value is read each time it is asked for, so
    keep a vocabulary rather than ask twice. Integers, floats and bools come as Python values, arrays of them as new
    NumPy arrays of the stored type, arrays of strings as lists. A string's bytes that are not UTF-8 (some
    vocabularies cut characters in two) become lone surrogates, so that ``text.encode("utf-8", "surrogateescape")``
    gives the stored bytes of every string back.

    Args:
        cursor: at the first pair; moved past the last.
        n_pairs: how many pairs the header announces.
    """

    def __init__(self, cursor: Cursor, n_pairs: int, file: FileData) -> None:
        self._file = file
        self._offsets: dict[str, int] = {}
        for _ in range(n_pairs):
            start = cursor.offset
            key = cursor.name("metadata key", MAX_KEY_BYTES)
            if key in self._offsets:
                raise cursor.damaged(f"byte {start}: metadata key {shown(key)} appears twice")
            self._offsets[key] = cursor.offset
            what = f"metadata {shown(key)}"
            _skip_value(cursor, _value_type(cursor, what), what)

    def __getitem__(self, key: str) -> MetadataValue:
        cursor = Cursor(self._file, self._offsets[key])
        what = f"metadata {shown(key)}"
        return _read_value(cursor, _value_type(cursor, what), what)

    def __contains__(self, key: object) -> bool:
        return key in self._offsets

    def __iter__(self) -> Iterator[str]:
        return iter(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets)

    def type_name(self, key: str) -> str:
        """The stored type of a value, as in ``uint32`` or ``array of 151936 string``; nothing large is read."""
        cursor = Cursor(self._file, self._offsets[key])
        kind = _value_type(cursor, key)
        if kind is not ValueType.ARRAY:
            return kind.name.lower()
        item = _value_type(cursor, key)
        return f"array of {cursor.u64(key)} {item.name.lower()}"

    def stored(self, key: str) -> bytes:
        """A value as the file holds it, its type before it: to be written to another file unchanged."""
        start = self._offsets[key]
        cursor = Cursor(self._file, start)
        _skip_value(cursor, _value_type(cursor, key), key)
        return self._file.data[start : cursor.offset]

    def require(self, key: str, type_: type[T]) -> T:
        """The value of ``key``, which must be there and be of ``type_``.

        Args:
            key: the full key, as in ``qwen3.block_count``.
            type_: ``int`` (any stored width), ``float``, ``bool``, ``str``, ``list[str]`` or ``np.ndarray`` (numbers).

        Raises:
            UnsupportedModel: there is no such key.
            InvalidModelFile: the value is of another type; nothing is converted.
            TypeError: ``type_`` is none of those.
        """
        wanted = _wanted(type_)
        if key not in self._offsets:
            raise UnsupportedModel(f"{self._file.path}: metadata {shown(key)} is missing ({wanted} wanted)")
        # _of_type compares the stored type with type_, which mypy cannot see.
        return self._of_type(key, wanted)  # type: ignore[return-value]

    def typed(self, key: str, type_: type[T], default: D) -> T | D:
        """The value of ``key`` if it is there, of ``type_`` as for ``require``, else ``default``."""
        wanted = _wanted(type_)
        # As in require: the comparison with type_ is one that mypy cannot see.
        return self._of_type(key, wanted) if key in self._offsets else default  # type: ignore[return-value]

    def _of_type(self, key: str, wanted: str) -> MetadataValue:
        cursor = Cursor(self._file, self._offsets[key])
        kind = _value_type(cursor, key)
        item = _value_type(cursor, key) if kind is ValueType.ARRAY else None
        if wanted != _python_name(kind, item):
            type_name = self.type_name(key)
            raise InvalidModelFile(f"{self._file.path}: metadata {shown(key)} is {type_name}, but {wanted} is wanted")
        return self[key]


def _wanted(type_: type) -> str:
    accepted = {int: "int", float: "float", bool: "bool", str: "str", list[str]: "list[str]", np.ndarray: "np.ndarray"}
    if type_ not in accepted:
        raise TypeError(f"no metadata has the type {type_!r} (accepted: {', '.join(accepted.values())})")
    return accepted[type_]


def _python_name(kind: ValueType, item: ValueType | None) -> str:
    if item is not None:
        return {ValueType.STRING: "list[str]", ValueType.ARRAY: "list"}.get(item, "np.ndarray")
    named = {ValueType.STRING: "str", ValueType.BOOL: "bool", ValueType.FLOAT32: "float", ValueType.FLOAT64: "float"}
    return named.get(kind, "int")


def _value_type(cursor: Cursor, what: str) -> ValueType:
    start = cursor.offset
    type_id = cursor.u32(f"type of {what}")
    try:
        return ValueType(type_id)
    except ValueError:
        raise UnsupportedModel(
            f"{cursor.path}: byte {start}: {what} has the unknown type id {type_id} (known: 0 to {max(ValueType)})"
        ) from None


def _array_header(cursor: Cursor, what: str) -> tuple[ValueType, int]:
    """Read an array's item type and length, and check that the file is large enough for them."""
    item = _value_type(cursor, what)
    variable = {ValueType.STRING: _MIN_STRING_BYTES, ValueType.ARRAY: _MIN_ARRAY_BYTES}
    min_bytes = variable[item] if item in variable else _SCALARS[item].itemsize
    return item, cursor.count(f"the number of items of {what}", min_bytes)


def _skip_value(cursor: Cursor, kind: ValueType, what: str, depth: int = 0) -> None:
    """Move past a value, checking all of it, so that reading it later cannot fail."""
    if kind is ValueType.STRING:
        cursor.skip(cursor.u64(f"length of {what}"), what)
    elif kind is ValueType.ARRAY:
        _skip_array(cursor, what, depth + 1)
    else:
        _skip_numbers(cursor, kind, 1, what)


def _skip_array(cursor: Cursor, what: str, depth: int) -> None:
    if depth > MAX_ARRAY_DEPTH:
        raise UnsupportedModel(
            f"{cursor.path}: byte {cursor.offset}: {what} has arrays nested more than {MAX_ARRAY_DEPTH} deep"
        )
    item, n = _array_header(cursor, what)
    if item is ValueType.STRING:
        cursor.spend(n, what)
        cursor.skip_texts(n, what)
    elif item is ValueType.ARRAY:
        cursor.spend(n, what)
        for _ in range(n):
            _skip_array(cursor, what, depth + 1)
    else:
        _skip_numbers(cursor, item, n, what)


def _skip_numbers(cursor: Cursor, kind: ValueType, n: int, what: str) -> None:
    start = cursor.skip(n * _SCALARS[kind].itemsize, what)
    if kind is ValueType.BOOL:
        values = np.frombuffer(cursor.data, np.uint8, n, start)
        if values.size and values.max() > 1:
            at = start + int(np.argmax(values > 1))
            raise cursor.damaged(f"byte {at}: {what} holds the bool {cursor.data[at]}, which is neither 0 nor 1")


def _read_value(cursor: Cursor, kind: ValueType, what: str) -> MetadataValue:
    if kind is ValueType.STRING:
        return cursor.text(what)
    if kind is ValueType.ARRAY:
        return _read_array(cursor, what)
    value: bool | int | float = _read_numbers(cursor, kind, 1, what)[0].item()
    return value


def _read_array(cursor: Cursor, what: str) -> MetadataValue:
    item, n = _array_header(cursor, what)
    if item is ValueType.STRING:
        return cursor.texts(n)
    if item is ValueType.ARRAY:
        return [_read_array(cursor, what) for _ in range(n)]
    return _read_numbers(cursor, item, n, what)


def _read_numbers(cursor: Cursor, kind: ValueType, n: int, what: str) -> NDArray[Any]:
    dtype = _SCALARS[kind]
    start = cursor.skip(n * dtype.itemsize, what)
    # A copy in the machine's own byte order: values in the file are not aligned, and must outlive the mapping.
    return np.frombuffer(cursor.data, dtype, n, start).astype(dtype.newbyteorder("="))
