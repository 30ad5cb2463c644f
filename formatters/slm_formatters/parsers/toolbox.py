"""The tools that a model may call: their names, and the types of their parameters.

Formats that write every argument as text lose the type: "7" may be a number or a text. The tool's schema decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Schema: TypeAlias = Mapping[str, object]

_MAX_DEPTH = 16
_COMBINERS = ("anyOf", "oneOf", "allOf")


class Toolbox:
    """Tools by name.

    Args:
        tools: JSON schemas, with or without the wrapping ``{"type": "function", "function": ...}``.
    """

    def __init__(self, tools: Sequence[Schema]) -> None:
        self._parameters: dict[str, Schema] = {}
        for tool in tools:
            function = _mapping(tool.get("function")) or tool
            parameters = function.get("parameters", function.get("input_schema"))
            self._parameters[str(function.get("name"))] = _mapping(parameters)

    def may_be(self, name: str) -> bool:
        """Whether the tool exists, or the tools are unknown."""
        return not self._parameters or name in self._parameters

    def parameters(self, name: str) -> Shape:
        """The schema of a tool's parameters."""
        schema = self._parameters.get(name, {})
        return Shape(schema, schema)


class Shape:
    """The schema of a value; an empty schema allows any value.

    Args:
        schema: the value's schema.
        root: the schema for references.
    """

    def __init__(self, schema: Schema, root: Schema) -> None:
        self._root = root
        self._variants = list(_variants(schema, root, _MAX_DEPTH))

    @property
    def types(self) -> frozenset[str]:
        """The possible JSON types of the value; empty if unknown."""
        return frozenset(name for variant in self._variants for name in _types(variant))

    def member(self, key: str) -> Shape:
        """The schema of a mapping's value."""
        for variant in self._variants:
            member = _mapping(variant.get("properties")).get(key, variant.get("additionalProperties"))
            if isinstance(member, Mapping):
                return Shape(member, self._root)
        return Shape({}, {})

    def item(self) -> Shape:
        """The schema of a list's items."""
        for variant in self._variants:
            if isinstance(items := variant.get("items"), Mapping):
                return Shape(items, self._root)
        return Shape({}, {})


def _variants(schema: Schema, root: Schema, depth: int) -> list[Schema]:
    """The schema, and all schemas that it combines or refers to."""
    variants = [schema]
    if depth == 0:
        return variants
    for name in _COMBINERS:
        options = schema.get(name)
        for option in options if isinstance(options, Sequence) else ():
            variants += _variants(_mapping(option), root, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        variants += _variants(_resolve(reference, root), root, depth - 1)
    return variants


def _resolve(reference: str, root: Schema) -> Schema:
    node: object = root
    for key in reference.removeprefix("#/").split("/"):
        node = _mapping(node).get(key)
    return _mapping(node)


def _types(schema: Schema) -> list[str]:
    if "const" in schema:
        return [json_type(schema["const"])]
    named, values = schema.get("type"), schema.get("enum")
    if isinstance(named, str):
        return [named]
    if isinstance(named, Sequence):
        return [str(name) for name in named]
    return [json_type(value) for value in values] if isinstance(values, Sequence) else []


def json_type(value: object) -> str:
    """The JSON type of a decoded value."""
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "array"


def _mapping(value: object) -> Schema:
    return value if isinstance(value, Mapping) else {}
