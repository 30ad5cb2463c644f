"""Typed metadata, parsed lazily."""

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
RANK_POOLING, RANK_EOS_TWICE = f"{OWN}rank.pooling", f"{OWN}rank.eos_twice"
"""Keys of rerankers: the pooling before the head; whether two EOS tokens separate both texts."""

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

    All values are checked when the file is opened, but not copied: each access reads the value again, so store a
    vocabulary after reading it. Integers, floats and bools are Python values, arrays of them are new NumPy arrays of
    the stored type, arrays of strings are lists. Bytes that are not UTF-8 (some vocabularies split characters) become
    lone surrogates, so that ``text.encode("utf-8", "surrogateescape")`` returns the stored bytes of every string.

    Args:
        cursor: a cursor at the first pair; it is moved past the last pair.
        n_pairs: the number of pairs in the header.
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
        """The stored type of a value, such as ``uint32`` or ``array of 151936 string``, without reading the value."""
        cursor = Cursor(self._file, self._offsets[key])
        kind = _value_type(cursor, key)
        if kind is not ValueType.ARRAY:
            return kind.name.lower()
        item = _value_type(cursor, key)
        return f"array of {cursor.u64(key)} {item.name.lower()}"

    def stored(self, key: str) -> bytes:
        """The stored bytes of a value, with its type, for copying it to another file."""
        start = self._offsets[key]
        cursor = Cursor(self._file, start)
        _skip_value(cursor, _value_type(cursor, key), key)
        return self._file.data[start : cursor.offset]

    def require(self, key: str, type_: type[T]) -> T:
        """The value of ``key``, which must exist and have the type ``type_``.

        Args:
            key: the full key, such as ``qwen3.block_count``.
            type_: ``int`` (any stored width), ``float``, ``bool``, ``str``, ``list[str]`` or ``np.ndarray`` (numbers).

        Raises:
            UnsupportedModel: there is no such key.
            InvalidModelFile: the value has another type; values are not converted.
            TypeError: ``type_`` is another type.
        """
        expected_type = _expected_type(type_)
        if key not in self._offsets:
            raise UnsupportedModel(f"{self._file.path}: metadata {shown(key)} is missing ({expected_type} wanted)")
        # _of_type compares the stored type with type_, which mypy cannot see.
        return self._of_type(key, expected_type)  # type: ignore[return-value]

    def typed(self, key: str, type_: type[T], default: D) -> T | D:
        """The value of ``key`` with the type ``type_``, see ``require``; ``default`` if the key is missing."""
        expected_type = _expected_type(type_)
        # As in require, mypy cannot see that the types are compared.
        return self._of_type(key, expected_type) if key in self._offsets else default  # type: ignore[return-value]

    def _of_type(self, key: str, expected: str) -> MetadataValue:
        cursor = Cursor(self._file, self._offsets[key])
        kind = _value_type(cursor, key)
        item = _value_type(cursor, key) if kind is ValueType.ARRAY else None
        if expected != _python_name(kind, item):
            type_name = self.type_name(key)
            raise InvalidModelFile(f"{self._file.path}: metadata {shown(key)} is {type_name}, but {expected} is wanted")
        return self[key]


def _expected_type(type_: type) -> str:
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
    """Move past a value and check it, so that reading it later cannot fail."""
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
    # A copy in native byte order, because values in the file are not aligned, and arrays must outlive the mapping.
    return np.frombuffer(cursor.data, dtype, n, start).astype(dtype.newbyteorder("="))
