"""Converts messages to mappings for chat templates, like transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

from slm_core.errors import InvalidOption, TemplateError
from slm_core.types import Message, ToolCall

MessageLike: TypeAlias = Message | Mapping[str, object]
"""A message, or a mapping for a template: "role", "content" (a text, or a list of parts), ..."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""The keys of reasoning in templates, the most common key first."""

_NAME, _ARGUMENTS = "probe_function", {"probe_key": "probe_value"}
_AS_TEXT, _AS_PYTHON = json.dumps(_ARGUMENTS), str(_ARGUMENTS)
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Probe",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "Any"}},
            "required": ["probe_key"],
        },
    },
}


class Arguments(Enum):
    """The form in which a template expects the arguments of a tool call."""

    MAPPING = "mapping"
    TEXT = "text"
    EITHER = "either"


Render: TypeAlias = Callable[[Sequence[Mapping[str, object]], "Sequence[Mapping[str, object]] | None"], str]
"""Renders messages and tools, without a generation prompt; raises ``TemplateError``."""


def as_mapping(message: MessageLike, wanted: Arguments = Arguments.EITHER) -> dict[str, object]:
    """A message as a mapping for templates, without empty keys.

    A mapping is copied without keys that are None. JSON text of arguments is parsed if the template expects a mapping.

    Args:
        message: the message.
        wanted: the form in which the template expects arguments.

    Raises:
        TemplateError: ``message`` is neither a message nor a mapping.
    """
    if isinstance(message, Message):
        return _from_message(message, wanted)
    if not isinstance(message, Mapping):
        raise TemplateError(f"a message cannot be a {type(message).__name__} (accepted: Message, mapping)")
    fields = {name: value for name, value in message.items() if value is not None}
    calls = fields.get("tool_calls")
    if wanted is Arguments.MAPPING and isinstance(calls, Sequence) and not isinstance(calls, str):
        fields["tool_calls"] = [_parsed(call) for call in calls]
    reasoning = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def has_calls(messages: Iterable[MessageLike]) -> bool:
    """Whether any of the messages calls a tool."""
    return any(
        bool(message.tool_calls) if isinstance(message, Message) else bool(message.get("tool_calls"))
        for message in messages
    )


def wanted_arguments(render: Render) -> Arguments:
    """Detect the form in which a template expects arguments, by rendering a call in both forms."""
    mapping, text = (_outcome(render, arguments) for arguments in (_ARGUMENTS, _AS_TEXT))
    if mapping is None or _AS_PYTHON in mapping:
        return Arguments.EITHER if text is None else Arguments.TEXT
    return Arguments.EITHER if text == mapping else Arguments.MAPPING


def _outcome(render: Render, arguments: object) -> str | None:
    call = {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    conversation: list[dict[str, object]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    for tools in ([_TOOL], None):
        try:
            return render(conversation, tools)
        except TemplateError:  # the template refuses this form
            continue
    return None


def _from_message(message: Message, form: Arguments) -> dict[str, object]:
    if message.rows:
        raise InvalidOption("a template renders text, and a message has embedding rows (let a Chat render it)")
    content = message.content + "".join(call.text for call in message.malformed_calls)
    fields: dict[str, object] = {"role": message.role.value, "content": content}
    if message.reasoning is not None:
        fields["reasoning_content"] = fields["thinking"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [_from_call(call, form) for call in message.tool_calls]
    optional = {"name": message.name, "tool_call_id": message.tool_call_id}
    return fields | {name: value for name, value in optional.items() if value is not None}


def _from_call(call: ToolCall, form: Arguments) -> dict[str, object]:
    arguments = json.dumps(call.arguments, ensure_ascii=False) if form is Arguments.TEXT else call.arguments
    identity = {} if call.id is None else {"id": call.id}
    return {"type": "function", **identity, "function": {"name": call.name, "arguments": arguments}}


def _parsed(call: Any) -> Any:
    """A call with its arguments as a mapping, if they are JSON text of a mapping."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):  # not JSON: the template gets the text
        return call
    if not isinstance(arguments, dict):
        return call
    parsed_function = {**function, "arguments": arguments}
    return {**call, "function": parsed_function} if "function" in call else parsed_function
