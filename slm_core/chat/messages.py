"""Messages in the forms in which callers write them; messages as JSON values, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, cast

from slm_core.chat.rows_dump import read_rows, write_rows
from slm_core.embedding_rows import EmbeddingRows
from slm_core.errors import InvalidOption, InvalidSnapshot
from slm_core.hints import did_you_mean
from slm_core.types import MalformedCall, Message, Role, ToolCall

_LISTS = ("tool_calls", "malformed_calls")
_TEXTS = ("content", "reasoning", "name", "tool_call_id")
_REASONING = ("reasoning", "reasoning_content", "thinking")
_KEYS = ("role", "content", *_REASONING, "tool_calls", "name", "tool_call_id")
_FORMS = "a text, a Message, a mapping such as {'role': 'user', 'content': 'Hello'}, or a list of messages"

MessageLike: TypeAlias = Message | Mapping[str, object]
"""A message, or a mapping with the keys of OpenAI's chat messages: "role", "content", "tool_calls", ..."""


def as_messages(content: str | MessageLike | Sequence[MessageLike]) -> tuple[Message, ...]:
    """Messages in any form: a text is a user's message.

    Mappings have the keys of OpenAI's chat messages; content may be a list of texts, text parts and
    ``EmbeddingRows``, and the arguments of a tool call may be JSON text. A key whose value is None counts as absent.

    Raises:
        InvalidOption: another form, an unknown role or key, or an invalid value; the message says where.
    """
    if isinstance(content, str):
        return (Message(Role.USER, content),)
    if isinstance(content, Message | Mapping):
        return (_message(content, "the message"),)
    if not isinstance(content, Sequence):
        raise InvalidOption(f"{content!r:.80} is not a message (accepted: {_FORMS})")
    return tuple(_message(each, f"message {i}") for i, each in enumerate(content))


def _message(value: object, where: str) -> Message:
    if isinstance(value, Message):
        return value
    if not isinstance(value, Mapping):
        raise InvalidOption(f"{where} is {value!r:.80} (accepted: {_FORMS})")
    fields = {key: each for key, each in value.items() if each is not None}
    unknown = next((key for key in fields if key not in _KEYS), None)
    if unknown is not None:
        raise InvalidOption(
            f"{where} has an unknown key {unknown!r} (accepted: {', '.join(_KEYS)}{did_you_mean(unknown, _KEYS)})"
        )
    if "role" not in fields:
        raise InvalidOption(f"{where} has no 'role' (accepted: {', '.join(Role)})")
    name, call_id = (
        _text(fields[key], f"{where}: {key!r}") if key in fields else None for key in ("name", "tool_call_id")
    )
    reasoning = next((_text(fields[key], f"{where}: {key!r}") for key in _REASONING if key in fields), None)
    content, calls = _content(fields.get("content", ""), where), _calls(fields.get("tool_calls", ()), where)
    try:
        return Message(cast("Role", fields["role"]), content, reasoning, calls, name, call_id)
    except InvalidOption as error:
        raise InvalidOption(f"{where}: {error}") from None


def _content(value: object, where: str) -> str | list[str | EmbeddingRows]:
    """The content of a message, which may be a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        raise InvalidOption(f"{where}: content {value!r:.80} (accepted: a text, or a list of parts)")
    return [_part(part, where) for part in value]


def _part(part: object, where: str) -> str | EmbeddingRows:
    if isinstance(part, str | EmbeddingRows):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text":
        return _text(part.get("text"), f"{where}: the 'text' of a part")
    raise InvalidOption(f"{where}: content part {part!r:.80} (accepted: texts, text parts and EmbeddingRows)")


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidOption(f"{what} is {value!r:.80} (accepted: a text)")
    return value


def _calls(value: object, where: str) -> tuple[ToolCall, ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise InvalidOption(f"{where}: tool_calls {value!r:.80} (accepted: a list of calls)")
    return tuple(_call(each, f"{where}: tool call {i}") for i, each in enumerate(value))


def _call(value: object, where: str) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(function, Mapping):
        raise InvalidOption(f"{where} is {value!r:.80} (accepted: a mapping with 'function' and 'id')")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise InvalidOption(f"{where}: arguments {function.get('arguments')!r:.80} (accepted: a JSON object)")
    call_id = value.get("id")
    return ToolCall(
        _text(function.get("name"), f"{where}: the name"),
        arguments,
        None if call_id is None else _text(call_id, f"{where}: the id"),
    )


def to_json(message: Message, sections: list[bytes]) -> dict[str, object]:
    """A message as JSON values; the numbers of its embedding rows are appended to ``sections``."""
    calls = [{"name": call.name, "arguments": dict(call.arguments), "id": call.id} for call in message.tool_calls]
    texts = {name: getattr(message, name) for name in _TEXTS}
    malformed = [{"text": call.text, "reason": call.reason} for call in message.malformed_calls]
    rows = {"rows": [write_rows(each, sections) for each in message.rows]} if message.rows else {}
    return {"role": message.role.value, **texts, "tool_calls": calls, "malformed_calls": malformed, **rows}


def from_json(value: object, sections: Iterator[bytes]) -> Message:
    """A message from the result of ``to_json``, with the next of its sections.

    Raises:
        InvalidSnapshot: the value is malformed.
    """
    if not isinstance(value, dict) or set(value) - {"rows"} != {"role", *_LISTS, *_TEXTS}:
        raise InvalidSnapshot("the dump holds a malformed message")
    optional = (value["reasoning"], value["name"], value["tool_call_id"])
    sound = isinstance(value["content"], str) and all(text is None or isinstance(text, str) for text in optional)
    sound = sound and all(isinstance(value.get(name, []), list) for name in (*_LISTS, "rows"))
    if not sound or value["role"] not in [role.value for role in Role]:
        raise InvalidSnapshot("the dump holds a malformed message")
    calls = tuple(_call_from_json(call) for call in value["tool_calls"])
    malformed = tuple(_malformed_from_json(call) for call in value["malformed_calls"])
    rows = tuple(read_rows(each, sections) for each in value.get("rows", ()))
    try:
        return Message(**{**value, "tool_calls": calls, "malformed_calls": malformed, "rows": rows})
    except InvalidOption as error:
        raise InvalidSnapshot(f"the dump holds a malformed message: {error}") from error


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
