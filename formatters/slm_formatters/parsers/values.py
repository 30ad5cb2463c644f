"""Converts arguments in plain text to values of the types in the tool's schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slm_formatters.parsers import json_text, literals
from slm_formatters.parsers.reader import Malformed
from slm_formatters.parsers.toolbox import Shape, json_type

_EMPTY: Mapping[frozenset[str], Callable[[], object]] = {frozenset({"array"}): list, frozenset({"object"}): dict}
"""The value of an empty text, by the types of the schema."""


def restore(text: str, shape: Shape) -> object:
    """The value of a text.

    A text stays a text if the schema allows only texts, or if it cannot be parsed as another type of the schema.
    Without types in the schema, it is parsed as JSON or as a Python literal, except strings.
    """
    types = shape.types
    if types == {"string"}:
        return text
    if not text.strip() and types in _EMPTY:
        return _EMPTY[types]()
    for read in (json_text.decode, literals.decode):
        try:
            value = read(text)
        except Malformed:
            continue
        if _fits(value, types):
            return value
    return text


def is_text(shape: Shape) -> bool:
    """Whether the value can only be a text, so that it can stream before it is complete."""
    return shape.types == {"string"}


def _fits(value: object, types: frozenset[str]) -> bool:
    kind = json_type(value)
    if not types:
        return kind != "string"
    if value is None and "string" not in types:  # models write null for omitted values
        return True
    return kind in types or (kind == "integer" and "number" in types)
