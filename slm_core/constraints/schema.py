"""Lowers JSON schemas for llguidance: refuses keywords that it would ignore, and rewrites references."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from slm_core.constraints.dataclass_schema import dataclass_schema, is_dataclass_type
from slm_core.constraints.limits import Limits
from slm_core.errors import ConstraintError
from slm_core.jsonfile import depth_of

if TYPE_CHECKING:
    from pydantic import BaseModel

_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties"}
_VALUES = {
    *("type", "enum", "const", "required", "$ref", "minProperties", "maxProperties", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_ANNOTATIONS = {
    *("$schema", "$id", "$comment", "title", "description", "default", "example", "examples"),
    *("deprecated", "readOnly", "writeOnly", "discriminator"),
}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_NEAR = 1e-9
_MAX_DEPTH = 300  # of JSON, values included: Python's own recursion ends at 1000
_NEEDS_ESCAPE = re.compile(r"[^\b\t\n\f\r -~\x80-\U0010ffff]")
KEYWORDS = tuple(sorted(_MAPS | _LISTS | _SCHEMAS | _VALUES))
"""The keywords of JSON Schema (2020-12) that are enforced."""


def pydantic_model(schema: object) -> type[BaseModel] | None:
    """The class, if ``schema`` is a pydantic model; else None."""
    if not isinstance(schema, type):
        return None
    try:
        from pydantic import BaseModel
    except ModuleNotFoundError:
        return None  # then ``schema`` cannot be a pydantic model
    return schema if issubclass(schema, BaseModel) else None


def schema_text(schema: object) -> str:
    """A schema as JSON text: of a mapping, ``True`` or ``False``, JSON text, a pydantic model or a dataclass.

    Raises:
        ConstraintError: it is none of these, or invalid JSON.
    """
    model = pydantic_model(schema)
    if model is not None:
        schema = model.model_json_schema()
    elif is_dataclass_type(schema):
        schema = dataclass_schema(schema)
    if isinstance(schema, str):
        return _checked_text(schema)
    if depth_of(schema) > _MAX_DEPTH:
        raise ConstraintError(f"the schema nests deeper than {_MAX_DEPTH} levels")
    if not isinstance(schema, Mapping | bool):
        raise ConstraintError(f"schema {schema!r} (accepted: a JSON schema, a pydantic model, a dataclass)")
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, default=_as_dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema is not JSON: {error}") from error


def lower_schema(schema: Any, limits: Limits, root: str = "#") -> Any:
    """The schema with only enforced keywords, for the position ``root`` in a larger schema.

    Args:
        schema: JSON values.
        limits: the limits on its nesting depth.
        root: a JSON pointer, which replaces ``#`` in its references to itself.

    Raises:
        ConstraintError: a keyword cannot be enforced, or the schema nests too deep; the message has the position.
    """
    lowering = _Lowering(limits.depth, root)
    lowered = lowering.schema(schema, "$", 0)
    levels = sum(1 + depth_of(one) for one in (schema, *(_pointed_at(schema, t) for t in lowering.references)))
    if levels > limits.levels:
        raise ConstraintError(f"the schema and its references nest {levels} levels (accepted: {limits.levels})")
    return lowered


class _Lowering:
    def __init__(self, depth: int, root: str) -> None:
        self._depth = depth
        self._root = root
        self.references: set[str] = set()

    def schema(self, schema: Any, location: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ConstraintError(f"the schema at {location} is {schema!r} (accepted: an object, true or false)")
        if depth > self._depth:
            raise ConstraintError(f"the schema nests deeper than {self._depth} at {location}")
        lowered = {}
        for keyword, value in schema.items():
            if keyword in _ANNOTATIONS or _says_nothing(keyword, value):
                continue
            lowered[keyword] = self._keyword(keyword, value, f"{location}.{keyword}", depth + 1)
        return _with_narrow_bounds(lowered)

    def _keyword(self, keyword: str, value: Any, location: str, depth: int) -> Any:
        if keyword in _MAPS:
            entries = _checked(value, dict, location, "an object").items()
            return {name: self.schema(inner, f"{location}.{name}", depth) for name, inner in entries}
        if keyword in _LISTS:
            inners = _checked(value, list, location, "an array; for items, see prefixItems")
            return [self.schema(inner, f"{location}[{i}]", depth) for i, inner in enumerate(inners)]
        if keyword in _SCHEMAS:
            return self.schema(value, location, depth)
        if keyword == "$ref":
            return self._reference(_checked(value, str, location, "a string"), location)
        if keyword not in _VALUES:
            raise ConstraintError(f"{location}: the keyword cannot be enforced (accepted: {', '.join(KEYWORDS)})")
        if keyword in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConstraintError(f"{location} is {value!r} (accepted: a number)")
        if keyword in ("const", "enum"):
            _check_writable(value, location)
        return value

    def _reference(self, target: str, location: str) -> str:
        if not target.startswith("#/") and target != "#":
            raise ConstraintError(f"{location} is {target!r} (accepted: a JSON pointer into the schema, #/...)")
        self.references.add(target)
        return self._root + target[1:]


def _pointed_at(schema: Any, pointer: str) -> object:
    """The value at a JSON pointer; the whole schema if there is none, which llguidance reports."""
    target = schema
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, dict) else None
        if target is None:
            return schema
    return target


def _says_nothing(keyword: str, value: object) -> bool:
    """Whether a keyword that cannot be enforced has a value without effect."""
    return (keyword == "uniqueItems" and value is False) or (keyword.startswith("x-") and keyword != "x-guidance")


def _with_narrow_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace exclusive bounds that are less than 1 from the opposite bound by inclusive ones, a billionth further in.

    llguidance 1.9 treats such an exclusive bound as inclusive if it is an integer.
    """
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    above, below = schema.get("minimum", low), schema.get("maximum", high)
    if low is not None and below is not None and below - low < 1:
        del schema["exclusiveMinimum"]
        schema["minimum"] = max(above, low + _NEAR, math.nextafter(low, math.inf))
    if high is not None and above is not None and high - above < 1:
        del schema["exclusiveMaximum"]
        schema["maximum"] = min(below, high - _NEAR, math.nextafter(high, -math.inf))
    return schema


def _check_writable(value: object, location: str) -> None:
    """Refuse texts that need a ``u`` escape, which is not allowed because it could hide a name."""
    if isinstance(value, str) and _NEEDS_ESCAPE.search(value):
        raise ConstraintError(f"{location} holds a control character in {value!r}, which cannot be enforced")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_writable(inner, location)


def _checked(value: Any, kind: type, location: str, accepted: str) -> Any:
    if not isinstance(value, kind):
        raise ConstraintError(f"{location} is {value!r} (accepted: {accepted})")
    return value


def _checked_text(text: str) -> str:
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ConstraintError(f"the schema is not JSON: {error.msg}", line=error.lineno, column=error.colno) from error
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema is not JSON: {error}") from error
    if depth_of(values) > _MAX_DEPTH:
        raise ConstraintError(f"the schema nests deeper than {_MAX_DEPTH} levels")
    return text


def _refuse_constant(name: str) -> Callable[[], float]:
    raise ValueError(f"{name} is not a JSON number")


def _as_dict(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} is not a JSON value")
