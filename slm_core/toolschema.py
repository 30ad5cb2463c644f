"""JSON schemas of tools, made from typed Python functions and pydantic models.

The schema of a function is the same as from ``get_json_schema`` of transformers: types are from its annotations,
descriptions from its Google-style docstring.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

from slm_core.errors import InvalidOption
from slm_core.types import Tool

Schema: TypeAlias = dict[str, Any]

_SCALARS: dict[object, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_TYPES = _SCALARS | {list: "array", tuple: "array", dict: "object"}
_SECTION = re.compile(r"\s*(?:Args:|Returns:|Raises:)")
_ARGS = re.compile(r"\n\s*Args:\n")
_RETURNS = re.compile(r"\n\s*Returns:\n\s*")
_ARGUMENT = re.compile(r"([ \t]*)(\w+)(?:[ \t]*\([^()\n]*\))?:\s*(.*)", re.DOTALL)  # "city (str): Name of the city"
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE | re.DOTALL)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def tool_schemas(tools: Iterable[Tool]) -> list[Mapping[str, object]]:
    """The JSON schema of each tool; schemas are returned unchanged.

    Raises:
        InvalidOption: an object that is not a tool, or a function with missing annotations or descriptions.
    """
    return [tool_schema(tool) for tool in tools]


def tool_schema(tool: Tool) -> Mapping[str, object]:
    """The JSON schema of one tool.

    Args:
        tool: a schema; a function whose parameters all have annotations (bool, int, float, str, None, Any, list, tuple,
            dict, Literal, Enum, Optional and unions of these) and are described under ``Args:`` of its docstring,
            optionally with ``(choices: ["a", "b"])`` at the end; or a pydantic model, whose fields are the arguments.

    Raises:
        InvalidOption: an object that is not a tool, or a function with missing annotations or descriptions.
    """
    if isinstance(tool, Mapping):
        return tool
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        return _wrapped(_function(tool))
    if isinstance(tool, type):
        return _wrapped(_pydantic(tool))
    raise InvalidOption(
        f"a tool cannot be a {type(tool).__name__}"
        " (accepted: a JSON schema, a function with annotations and a docstring, a pydantic model)"
    )


def _wrapped(function: Schema) -> Schema:
    return {"type": "function", "function": function}


def _pydantic(model: Any) -> Schema:
    try:
        schema = model.model_json_schema()
    except AttributeError:
        raise InvalidOption(f"the class {model.__name__} cannot be a tool (accepted: pydantic models)") from None
    name, description = schema.pop("title", model.__name__), schema.pop("description", "")
    return {"name": name, "description": description, "parameters": schema}


def _function(function: Callable[..., object]) -> Schema:
    name = function.__name__
    doc = (inspect.getdoc(function) or "").strip()
    if not doc:
        raise _unusable(name, "it has no docstring")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise _unusable(name, "it is a generator, whose values no call waits for: return a list")
    descriptions = _descriptions(doc)
    properties, result_schema, required = _parameters(function)
    for argument, schema in properties.items():
        if argument not in descriptions:
            raise _unusable(name, f"its docstring does not describe {argument!r} under 'Args:'")
        schema |= _choices(name, descriptions[argument])
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    result: Schema = {"name": name, "description": _SECTION.split(doc, maxsplit=1)[0].strip(), "parameters": parameters}
    if result_schema is not None:
        result["return"] = result_schema | _result_description(doc)
    return result


def _parameters(function: Callable[..., object]) -> tuple[dict[str, Schema], Schema | None, list[str]]:
    """The schemas of the parameters, the schema of the result or None, and the names of required parameters."""
    name, signature = function.__name__, inspect.signature(function)
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # evaluating an annotation may raise any exception
        raise _unusable(name, f"an annotation cannot be evaluated: {error}") from error
    parameters = dict(signature.parameters)
    first = next(iter(parameters.values()), None)
    if first is not None and first.name in ("self", "cls") and first.annotation is inspect.Parameter.empty:
        del parameters[first.name]
    for parameter in parameters.values():
        if parameter.kind not in _NAMED:
            raise _unusable(name, f"{str(parameter)!r} cannot be passed by its name")
        if parameter.annotation is inspect.Parameter.empty:
            raise _unusable(name, f"{parameter.name!r} has no annotation")
    try:
        properties = {each: _of_hint(hints[each]) for each in parameters}
    except InvalidOption as error:
        raise _unusable(name, str(error)) from error
    required = [parameter.name for parameter in parameters.values() if parameter.default is inspect.Parameter.empty]
    return properties, _of_result(hints), required


def _of_result(hints: Mapping[str, object]) -> Schema | None:
    """The schema of a function's result; None without an annotation, or for a type that JSON lacks."""
    if "return" not in hints:
        return None
    try:
        return _of_hint(hints["return"])
    except InvalidOption:
        return None


def _of_hint(hint: Any) -> Schema:
    """The JSON schema of an annotation."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin is None:
        return _of_enum(hint) if isinstance(hint, type) and issubclass(hint, Enum) else _of_type(hint)
    if origin in (Union, types.UnionType):
        return _of_union(args)
    if origin is Literal:
        return _enumeration(hint, args)
    if origin is list:
        return {"type": "array", "items": _of_hint(args[0])}
    if origin is tuple:
        return _of_tuple(hint, args)
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_hint(args[1])}
    raise _unknown_type(hint)


def _of_type(hint: Any) -> Schema:
    if not isinstance(hint, type) or hint not in _TYPES:
        raise _unknown_type(hint)
    return {"type": _TYPES[hint]}


def _of_enum(hint: type[Enum]) -> Schema:
    return _enumeration(hint, [member.value for member in hint])


def _enumeration(hint: object, values: Sequence[object]) -> Schema:
    """One of several values, with the type of each."""
    if not values or any(type(value) not in _SCALARS for value in values):
        raise InvalidOption(f"{_type_name(hint)} must list values of type int, float, str, bool or None")
    kinds = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(values)}


def _of_union(args: Sequence[object]) -> Schema:
    """A union: a list of types if all members are plain types, else ``anyOf``; None makes it nullable."""
    schemas = [_of_hint(arg) for arg in args if arg is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        kinds = sorted({schema["type"] for schema in schemas})
        schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        schema = {"anyOf": schemas}
    return schema | ({"nullable": True} if type(None) in args else {})


def _of_tuple(hint: object, args: Sequence[object]) -> Schema:
    if len(args) < 2 or ... in args:
        raise InvalidOption(f"{_type_name(hint)} has no fixed length of two or more (use list[...])")
    return {"type": "array", "prefixItems": [_of_hint(arg) for arg in args]}


def _descriptions(doc: str) -> dict[str, str]:
    """The description of each argument under ``Args:``; it ends at the next name that is not indented deeper."""
    begin = _ARGS.search(doc)
    if begin is None:
        return {}
    block = re.split(r"\s*(?:Returns:|Raises:)", doc[begin.end() :], maxsplit=1)[0]
    entries: list[tuple[str, str, list[str]]] = []
    for line in filter(str.strip, block.split("\n")):
        opening = _ARGUMENT.match(line)
        if opening and not (entries and line.startswith((entries[-1][0] + " ", entries[-1][0] + "\t"))):
            entries.append((opening[1], opening[2], [opening[3].strip()]))
        elif entries:
            entries[-1][2].append(line.strip())
    return {name: " ".join(filter(None, words)) for _, name, words in entries}


def _choices(function: str, description: str) -> Schema:
    """A description; choices at its end become an enumeration."""
    match = _CHOICES.search(description)
    if match is None:
        return {"description": description}
    try:
        choices = json.loads(match[1])
    except ValueError as error:
        raise _unusable(function, f"its choices {match[1]!r} are not JSON: {error}") from error
    values = [choice.strip() if isinstance(choice, str) else choice for choice in choices]
    return {"enum": values, "description": description[: match.start()].strip()}


def _result_description(doc: str) -> Schema:
    begin = _RETURNS.search(doc)
    if begin is None:
        return {}
    return {"description": re.split(r"\s*Raises:", doc[begin.end() :], maxsplit=1)[0].strip()}


def _unusable(name: str, reason: str) -> InvalidOption:
    return InvalidOption(f"the function {name} cannot be a tool: {reason}")


def _unknown_type(hint: object) -> InvalidOption:
    accepted = "bool, int, float, str, None, Any, list, tuple, dict, Literal, Enum and unions of these"
    return InvalidOption(f"{_type_name(hint)} has no JSON schema (accepted: {accepted}; or give a schema as the tool)")


def _type_name(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint)
