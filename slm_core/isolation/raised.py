"""Exceptions as plain values. The parent rebuilds listed classes only."""

from __future__ import annotations

from typing import Any

from slm_core import errors
from slm_core.errors import BackendError, SlmError
from slm_core.isolation.values import Garbled

_LONGEST = 10_000  # characters of a message
_NEED_OBJECTS = (errors.RequestsFailed, errors.ToolError)  # they carry objects, and no backend raises them
_BUILTIN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
_CLASSES: dict[str, type[Exception]] = {kind.__name__: kind for kind in _BUILTIN} | {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, SlmError) and kind not in _NEED_OBJECTS
}
_FIELDS = ("seq_id", "needed", "free", "line", "column")


def described(error: BaseException) -> dict[str, object]:
    """An exception as plain values: the name of its nearest listed class, its message, and its numbers."""
    kind = next((kind for kind in type(error).__mro__ if _CLASSES.get(kind.__name__) is kind), None)
    message = str(error.args[0]) if isinstance(error, KeyError) and len(error.args) == 1 else str(error)
    if kind is None:
        kind, message = BackendError, f"{type(error).__name__}: {message}"
    fields = {name: value for name, value in vars(error).items() if name in _FIELDS and _is_number(value)}
    return {"kind": kind.__name__, "message": message[:_LONGEST], "fields": fields}


def rebuilt(value: Any) -> Exception:
    """The exception of ``described``.

    Raises:
        Garbled: not such a value.
    """
    try:
        kind, message, fields = _CLASSES[value["kind"]], value["message"], value["fields"].items()
    except Exception:
        raise Garbled("an unknown exception") from None
    if not isinstance(message, str) or len(message) > _LONGEST:
        raise Garbled("an exception without a message")
    error = kind.__new__(kind, message)  # constructors have different arguments; the fields are set below
    error.args = (message,)
    for name, number in fields:
        if name not in _FIELDS or not _is_number(number):
            raise Garbled("an exception with unknown fields")
        setattr(error, name, number)
    return error


def _is_number(value: object) -> bool:
    return value is None or type(value) is int
