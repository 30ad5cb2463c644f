"""Arguments of a call, converted from the model's JSON to the types of a function's annotations."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

_PLAIN: Mapping[Any, type] = {kind: kind for kind in (bool, int, float, str, list, dict, type(None))}
_EXACT = 2**53
"""Floats represent every integer up to this one exactly."""


class Misfit(ValueError):
    """Arguments do not fit; the message is for the model."""


def fitted(function: Callable[..., object], arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments to call a function with.

    Args:
        function: the called function; ``toolschema`` knows its annotations.
        arguments: JSON values by name.

    Returns:
        The arguments, with members of Enums, floats and tuples as annotated.

    Raises:
        Misfit: an argument is missing, unknown, or of the wrong type.
    """
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    unknown = [name for name in arguments if name not in parameters]
    if unknown:
        raise Misfit(f"there is no argument {unknown[0]!r} (there are: {', '.join(parameters) or 'none'})")
    absent = [name for name, p in parameters.items() if p.default is inspect.Parameter.empty and name not in arguments]
    if absent:
        raise Misfit(f"the argument {absent[0]!r} is missing")
    return {name: _fit(hints[name], value, name) for name, value in arguments.items()}


def fitted_value(hint: Any, value: object, path: str) -> object:
    """A JSON value, converted to the type of an annotation, which may be a dataclass.

    Raises:
        Misfit: the value has another type; the message has the path.
    """
    return _fit(hint, value, path)


def _fit(hint: Any, value: object, path: str) -> object:
    """A JSON value, converted to the type of a hint."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _fit_any(hint, args, value, path)
    if origin is Literal:
        return _one_of(hint, [(choice, choice) for choice in args], value, path)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _one_of(hint, [(member.value, member) for member in hint], value, path)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        return _fit_dataclass(hint, value, path)
    if origin in (list, tuple) and isinstance(value, list):
        return _fit_items(hint, origin, args, value, path)
    if origin is dict and isinstance(value, dict):
        return {key: _fit(args[1], each, f"{path}.{key}") for key, each in value.items()}
    return _fit_plain(hint, value, path)


def _fit_any(hint: object, args: Sequence[object], value: object, path: str) -> object:
    for arg in args:
        try:
            return _fit(arg, value, path)
        except Misfit:
            continue
    raise _misfit(path, value, hint)


def _fit_dataclass(hint: type, value: Mapping[str, object], path: str) -> object:
    hints = typing.get_type_hints(hint)
    return hint(**{name: _fit(hints[name], each, f"{path}.{name}") for name, each in value.items()})


def _fit_items(hint: object, origin: Any, args: Sequence[object], value: Sequence[object], path: str) -> object:
    if origin is tuple and len(args) != len(value):
        raise _misfit(path, value, hint)
    hints = args if origin is tuple else [args[0]] * len(value)
    return origin(_fit(hints[i], each, f"{path}[{i}]") for i, each in enumerate(value))


def _fit_plain(hint: Any, value: object, path: str) -> object:
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _EXACT:
        return float(value)
    if hint is tuple and isinstance(value, list):
        return tuple(value)
    if hint in _PLAIN and isinstance(value, _PLAIN[hint]) and (hint is bool or not isinstance(value, bool)):
        return value
    raise _misfit(path, value, hint)


def _one_of(hint: object, choices: Sequence[tuple[object, object]], value: object, path: str) -> object:
    """The choice with the JSON value ``value``; 1 is not True."""
    matches = [choice for written, choice in choices if written == value and type(written) is type(value)]
    if not matches:
        raise _misfit(path, value, f"one of {', '.join(json.dumps(written) for written, _ in choices)}")
    return matches[0]


def _misfit(path: str, value: object, hint: object) -> Misfit:
    expected = hint if isinstance(hint, str) else hint.__name__ if type(hint) is type else str(hint)
    return Misfit(f"the argument {path!r} is {json.dumps(value, ensure_ascii=False)}, not {expected}")
