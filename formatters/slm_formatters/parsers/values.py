"""Arguments that are written as plain text, turned back into the values that the tool's schema says they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slm_formatters.parsers import json_text, literals
from slm_formatters.parsers.reader import Malformed
from slm_formatters.parsers.toolbox import Shape, json_type

_EMPTY: Mapping[frozenset[str], Callable[[], object]] = {frozenset({"array"}): list, frozenset({"object"}): dict}
"""What no text at all says."""


def restore(text: str, shape: Shape) -> object:
    """The value that a text means.

    A text stays one where the schema allows nothing else, and where it cannot be read as any other type that the
    schema allows. Where nothing is known, it is what it says as JSON or as a Python literal, strings excepted.
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
    """Whether the value can only be a text, so that it need not be whole to be known."""
    return shape.types == {"string"}


def _fits(value: object, types: frozenset[str]) -> bool:
    kind = json_type(value)
    if not types:
        return kind != "string"
    if value is None and "string" not in types:  # models write null for what they leave out
        return True
    return kind in types or (kind == "integer" and "number" in types)
