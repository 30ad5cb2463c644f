"""Messages as JSON values, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from slm_core.errors import InvalidSnapshot
from slm_core.types import MalformedCall, Message, Role, ToolCall

_LISTS = ("tool_calls", "malformed_calls")
_TEXTS = ("content", "reasoning", "name", "tool_call_id")


def to_json(message: Message) -> dict[str, object]:
    """A message as JSON values."""
    calls = [{"name": call.name, "arguments": dict(call.arguments), "id": call.id} for call in message.tool_calls]
    texts = {name: getattr(message, name) for name in _TEXTS}
    malformed = [{"text": call.text, "reason": call.reason} for call in message.malformed_calls]
    return {"role": message.role.value, **texts, "tool_calls": calls, "malformed_calls": malformed}


def from_json(value: object) -> Message:
    """A message from the result of ``to_json``.

    Raises:
        InvalidSnapshot: the value is malformed.
    """
    if not isinstance(value, dict) or set(value) != {"role", *_LISTS, *_TEXTS}:
        raise InvalidSnapshot("the dump holds a malformed message")
    optional = (value["reasoning"], value["name"], value["tool_call_id"])
    sound = isinstance(value["content"], str) and all(text is None or isinstance(text, str) for text in optional)
    sound = sound and all(isinstance(value[name], list) for name in _LISTS)
    if not sound or value["role"] not in [role.value for role in Role]:
        raise InvalidSnapshot("the dump holds a malformed message")
    calls = tuple(_call_from_json(call) for call in value["tool_calls"])
    malformed = tuple(_malformed_from_json(call) for call in value["malformed_calls"])
    return Message(**{**value, "tool_calls": calls, "malformed_calls": malformed})


def _call_from_json(value: object) -> ToolCall:
    if not isinstance(value, dict) or set(value) != {"name", "arguments", "id"}:
        raise InvalidSnapshot("the dump holds a malformed tool call")
    call_id = value["id"]
    if not isinstance(value["name"], str) or not isinstance(value["arguments"], dict):
        raise InvalidSnapshot("the dump holds a malformed tool call")
    if call_id is not None and not isinstance(call_id, str):
        raise InvalidSnapshot("the dump holds a malformed tool call")
    return ToolCall(value["name"], cast("Mapping[str, object]", value["arguments"]), call_id)


def _malformed_from_json(value: object) -> MalformedCall:
    if not isinstance(value, dict) or set(value) != {"text", "reason"}:
        raise InvalidSnapshot("the dump holds a malformed tool call")
    if not all(isinstance(text, str) for text in value.values()):
        raise InvalidSnapshot("the dump holds a malformed tool call")
    return MalformedCall(**value)
