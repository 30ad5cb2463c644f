"""Checks JSON values against a pydantic model, or against the core of JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slm_core.errors import InvalidOption, OracleError

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_NOTES = {"$schema", "$id", "title", "description", "default", "examples"}
_KEYWORDS = {"type", "properties", "required", "additionalProperties", "items", "enum", "const"}


class Schema:
    """What an extracted value must look like.

    Args:
        schema: a pydantic model class, or a JSON schema of type, properties, required, additionalProperties
            (true or false), items, enum and const.

    Raises:
        InvalidOption: anything else; a keyword that would be ignored is refused.
    """

    def __init__(self, schema: object) -> None:
        self._model: Any = None
        if isinstance(schema, Mapping):
            self._schema: Mapping[str, Any] = schema
            _check_schema(schema, "$")
        else:
            self._model = _pydantic_model(schema)
            self._schema = self._model.model_json_schema()

    def question(self) -> str:
        """Asks for the JSON in plain words."""
        keys = ", ".join(self._schema.get("properties", {}))
        return f"Give me JSON with the keys {keys}." if keys else "Answer in JSON."

    def read(self, value: object) -> object:
        """The value, as a pydantic object where the schema is such a model.

        Raises:
            OracleError: it does not fit.
        """
        if self._model is None:
            _check_value(value, self._schema, "$")
            return value
        from pydantic import ValidationError

        try:
            return self._model.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "the whole"
            raise OracleError(
                f"the answer's JSON does not fit {self._model.__name__}: {place}: {first['msg']}"
            ) from error


def _pydantic_model(schema: object) -> Any:
    if isinstance(schema, type):
        try:
            from pydantic import BaseModel
        except ModuleNotFoundError:
            pass  # then the class cannot be one of its models
        else:
            if issubclass(schema, BaseModel):
                return schema
    raise InvalidOption(f"schema {schema!r} (accepted: a JSON schema as a mapping, or a pydantic model class)")


def _check_schema(schema: object, place: str) -> None:
    if not isinstance(schema, Mapping):
        raise InvalidOption(f"the schema at {place} is not a mapping")
    for keyword in schema:
        if keyword not in _KEYWORDS | _NOTES:
            raise InvalidOption(f"schema keyword {keyword!r} at {place} (accepted: {', '.join(sorted(_KEYWORDS))})")
    named = schema.get("type")
    for name in named if isinstance(named, list) else [] if named is None else [named]:
        if name not in _TYPES:
            raise InvalidOption(f"schema type {name!r} at {place} (accepted: {', '.join(_TYPES)})")
    if not isinstance(schema.get("additionalProperties", True), bool):
        raise InvalidOption(f"additionalProperties at {place} (accepted: true, false)")
    for name, inner in schema.get("properties", {}).items():
        _check_schema(inner, f"{place}.{name}")
    if "items" in schema:
        _check_schema(schema["items"], f"{place}[]")


def _check_value(value: object, schema: Mapping[str, Any], place: str) -> None:
    named = schema.get("type")
    names = named if isinstance(named, list) else [] if named is None else [named]
    if names and not any(_has_type(value, name) for name in names):
        raise OracleError(f"the answer's JSON does not fit: {place} is {value!r}, not {' or '.join(names)}")
    if "enum" in schema and value not in schema["enum"]:
        raise OracleError(f"the answer's JSON does not fit: {place} is {value!r}, not one of {schema['enum']!r}")
    if "const" in schema and value != schema["const"]:
        raise OracleError(f"the answer's JSON does not fit: {place} is {value!r}, not {schema['const']!r}")
    if isinstance(value, dict):
        _check_object(value, schema, place)
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            _check_value(item, schema["items"], f"{place}[{i}]")


def _check_object(value: Mapping[str, object], schema: Mapping[str, Any], place: str) -> None:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            raise OracleError(f"the answer's JSON does not fit: {place} lacks {name!r}")
    for name, inner in value.items():
        if name in properties:
            _check_value(inner, properties[name], f"{place}.{name}")
        elif schema.get("additionalProperties", True) is False:
            raise OracleError(f"the answer's JSON does not fit: {place} has an extra {name!r}")


def _has_type(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name]) or (name == "integer" and isinstance(value, float) and value.is_integer())
