"""Values as messages: JSON, and the raw bytes of arrays and long strings after it.

A message is JSON text and a payload. JSON holds None, booleans, numbers, short strings, lists and dicts. Any other
value is a dict with the key "$", which names its kind. Its bytes are in the payload, in order, padded to 8 bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidOption

_ALIGNMENT = 8
_LONG = 1000  # characters of a string that goes into the payload
_KINDS = "biuf"  # booleans, integers, floats


class Garbled(Exception):
    """A message that is not valid."""


class Message(NamedTuple):
    """A message as bytes.

    Attributes:
        header: the JSON text.
        payload: the buffers of the payload, with padding.
    """

    header: bytes
    payload: Sequence[bytes | memoryview]


def pack(value: object) -> Message:
    """Pack a value.

    Raises:
        InvalidOption: the value, or a part of it, is of a kind that cannot be sent to another process.
    """
    payload: list[bytes | memoryview] = []
    return Message(json.dumps(_encoded(value, payload)).encode(), payload)


def unpack(header: bytes, payload: memoryview) -> Any:
    """Unpack a value; arrays are views of the payload.

    Raises:
        Garbled: the bytes are not a message.
    """
    try:
        reader = _Reader(payload)
        value = reader.read(json.loads(header))
    except Garbled:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, MemoryError) as error:
        raise Garbled(f"{type(error).__name__}: {error}"[:200]) from None
    reader.check_end()
    return value


def _encoded(value: object, payload: list[bytes | memoryview]) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value if len(value) < _LONG else _blob("text", value.encode("utf-8", "surrogatepass"), payload)
    if isinstance(value, np.generic):
        return _encoded(value.item(), payload)
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        tag = {"$": "array", "dtype": value.dtype.str, "shape": value.shape}
        _append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data, payload)
        return tag
    if isinstance(value, bytes | bytearray | memoryview):
        return _blob("bytes", value, payload)
    if isinstance(value, Path):
        return {"$": "path", "value": os.fspath(value)}
    if isinstance(value, tuple):
        return {"$": "tuple", "value": [_encoded(item, payload) for item in value]}
    if isinstance(value, list):
        return [_encoded(item, payload) for item in value]
    if isinstance(value, dict) and "$" not in value and all(isinstance(key, str) for key in value):
        return {key: _encoded(item, payload) for key, item in value.items()}
    raise InvalidOption(f"a value of {type(value).__name__} cannot be sent to another process")


def _blob(kind: str, data: bytes | bytearray | memoryview, payload: list[bytes | memoryview]) -> object:
    view = memoryview(data).cast("B")
    _append(view, payload)
    return {"$": kind, "n": len(view)}


def _append(data: memoryview, payload: list[bytes | memoryview]) -> None:
    payload.append(data)
    if len(data) % _ALIGNMENT:
        payload.append(bytes(-len(data) % _ALIGNMENT))


class _Reader:
    """Reads the values of a message in order."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._position = 0
        self._kinds: dict[object, Callable[[dict[str, Any]], object]] = {
            "array": self._array,
            "bytes": lambda tag: bytes(self._bytes(tag["n"])),
            "text": lambda tag: bytes(self._bytes(tag["n"])).decode("utf-8", "surrogatepass"),
            "path": lambda tag: Path(tag["value"]),
            "tuple": lambda tag: tuple(self.read(item) for item in tag["value"]),
        }

    def read(self, value: object) -> object:
        """The value of parsed JSON."""
        if isinstance(value, list):
            return [self.read(item) for item in value]
        if isinstance(value, dict):
            if "$" in value:
                return self._kinds[value["$"]](value)
            return {key: self.read(item) for key, item in value.items()}
        return value

    def check_end(self) -> None:
        """Raise if the payload is longer than its values."""
        if self._position != len(self._payload):
            raise Garbled(f"{len(self._payload) - self._position} bytes too many")

    def _array(self, tag: dict[str, Any]) -> NDArray[Any]:
        dtype, shape = np.dtype(tag["dtype"]), tag["shape"]
        if dtype.kind not in _KINDS or not all(type(size) is int and size >= 0 for size in shape):
            raise Garbled("an array of another kind")
        return np.frombuffer(self._bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)

    def _bytes(self, n: int) -> memoryview:
        end = self._position + n
        if type(n) is not int or n < 0 or end > len(self._payload):
            raise Garbled("bytes are missing")
        data = self._payload[self._position : end]
        self._position = end + -n % _ALIGNMENT
        return data
