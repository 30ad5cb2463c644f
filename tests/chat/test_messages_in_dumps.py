"""Messages as JSON values in dumps: a round trip, and one error for each value that does not fit."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import slm_core as slm
from slm_core.chat.messages import from_json, to_json
from slm_core.embedding_rows import EmbeddingRows
from slm_core.errors import InvalidSnapshot
from slm_core.types import MalformedCall

CALLS = [slm.ToolCall("f", {"a": [1]}, "c1"), slm.ToolCall("g", {})]
MESSAGES = [
    slm.Message("system", "be"),
    slm.Message(
        "assistant", "x", "hm", CALLS, malformed_calls=[MalformedCall("{", "no object"), MalformedCall("", "")]
    ),
    slm.Message("tool", "1", name="f", tool_call_id="c1"),
    slm.Message("user", ["a", EmbeddingRows(np.ones((2, 3), np.float32), [(0, 2)], before="<", after=">"), "b"]),
]


def stored(message: slm.Message) -> tuple[Any, list[bytes]]:
    sections: list[bytes] = []
    return json.loads(json.dumps(to_json(message, sections))), sections


def test_arguments_of_a_call_may_be_any_mapping() -> None:
    call = slm.ToolCall("f", MappingProxyType({"a": [1]}), "c1")
    assert stored(slm.Message("assistant", "", tool_calls=[call])) == stored(
        slm.Message("assistant", "", tool_calls=CALLS[:1])
    )


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.role)
def test_a_message_is_the_same_after_a_dump(message: slm.Message) -> None:
    value, sections = stored(message)
    remaining = iter(sections)
    assert from_json(value, remaining) == message
    assert list(remaining) == []


def wrong_values(value: Any) -> Iterator[Any]:
    """The value with one part of another type, with one part missing, and with an additional part."""
    parts = list(value) if isinstance(value, dict) else range(len(value))
    for part in parts:
        for other in (None, True, 5, 0.5, "odd", ["odd"], {"odd": "odd"}):
            if type(other) is not type(value[part]):
                yield {**value, part: other} if isinstance(value, dict) else [*value[:part], other, *value[part + 1 :]]
        if isinstance(value[part], dict | list) and part != "arguments":
            for inner in wrong_values(value[part]):
                changed = copy.deepcopy(value)
                changed[part] = inner
                yield changed
    if isinstance(value, dict):
        for part in parts:
            yield {name: each for name, each in value.items() if name != part}
        yield {**value, "odd": 1}


def optional(value: Any) -> bool:
    """Whether a value is the message's, with None or another text in place of a part that may be absent."""
    try:
        from_json(value, iter(stored(MESSAGES[3])[1]))
    except InvalidSnapshot:
        return False
    return True


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.role)
def test_other_values_are_refused(message: slm.Message) -> None:
    value, _ = stored(message)
    n_refused, accepted = 0, []
    for wrong in wrong_values(value):
        if optional(wrong):
            accepted.append(wrong)
        n_refused += not optional(wrong)
    assert n_refused > 40
    absent = ("reasoning", "name", "tool_call_id", "id", "rows")
    for wrong in accepted:
        difference = _difference(value, wrong)
        assert difference in absent, f"a message with another {difference} is accepted: {wrong}"


def _difference(value: Any, other: Any) -> str:
    """The name of the part that differs, inside of lists, too."""
    if isinstance(value, dict) and isinstance(other, dict):
        names = [name for name in {**value, **other} if value.get(name, ...) != other.get(name, ...)]
        inner = value.get(names[0]), other.get(names[0])
        return _difference(*inner) if all(isinstance(each, list) for each in inner) and all(inner) else str(names[0])
    pairs = zip(value, other, strict=True)
    return next((_difference(a, b) for a, b in pairs if a != b), "")


@pytest.mark.parametrize("value", [None, [], "x", 5])
def test_a_value_that_is_no_object(value: object) -> None:
    with pytest.raises(InvalidSnapshot, match="malformed message"):
        from_json(value, iter(()))
