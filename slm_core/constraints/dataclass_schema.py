"""JSON schemas of dataclasses, from the annotations of their fields."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin

from slm_core.errors import ConstraintError

_TYPES: dict[object, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    list: "array",
    dict: "object",
}


def is_dataclass_type(schema: object) -> TypeGuard[type]:
    """Whether ``schema`` is a dataclass, not an object of one."""
    return isinstance(schema, type) and is_dataclass(schema)


def dataclass_schema(cls: type) -> dict[str, object]:
    """The schema of a dataclass: an object with its fields; fields without a default are required.

    Args:
        cls: the class; its fields are bool, int, float, str, None, Any, list, tuple, dict, Literal, Enum, dataclasses,
            or unions of these.

    Raises:
        ConstraintError: a field of another type; the message has its path.
    """
    return _of_dataclass(cls, cls.__name__, ())


def _of_dataclass(cls: Any, path: str, outer: tuple[type, ...]) -> dict[str, object]:
    if cls in outer:
        raise ConstraintError(f"{path}: {cls.__name__} contains itself; give a JSON schema or a pydantic model")
    try:
        hints = typing.get_type_hints(cls)
    except Exception as error:  # evaluating an annotation may raise any exception
        raise ConstraintError(f"{path}: an annotation cannot be evaluated: {error}") from error
    filled = [each for each in fields(cls) if each.init]
    required = [each.name for each in filled if each.default is MISSING and each.default_factory is MISSING]
    properties = {each.name: _of_hint(hints[each.name], f"{path}.{each.name}", (*outer, cls)) for each in filled}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _of_hint(hint: Any, path: str, outer: tuple[type, ...]) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if is_dataclass_type(hint):
        return _of_dataclass(hint, path, outer)
    if isinstance(hint, type) and origin is None and issubclass(hint, Enum):
        return _enumeration([member.value for member in hint], path)
    if origin is Literal:
        return _enumeration(args, path)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of_hint(arg, path, outer) for arg in args]}
    if origin is list:
        return {"type": "array", "items": _of_hint(args[0], f"{path}[]", outer)}
    if origin is tuple and ... not in args:
        items = [_of_hint(arg, f"{path}[{i}]", outer) for i, arg in enumerate(args)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items), "maxItems": len(items)}
    if origin is dict and args[0] is str:
        return {"type": "object", "additionalProperties": _of_hint(args[1], f"{path}.*", outer)}
    if isinstance(hint, type) and hint in _TYPES:
        return {"type": _TYPES[hint]}
    accepted = "bool, int, float, str, None, Any, list, tuple, dict, Literal, Enum, dataclasses and unions of these"
    raise ConstraintError(f"{path}: {hint} has no JSON schema (accepted: {accepted})")


def _enumeration(values: Sequence[object], path: str) -> dict[str, object]:
    if not values or any(type(value) not in (bool, int, float, str, type(None)) for value in values):
        raise ConstraintError(f"{path}: values {values!r:.80} (accepted: int, float, str, bool or None)")
    return {"enum": list(values)}
