"""Helpers of the tests of parsers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from slm_core.protocols import AnswerFormat
from slm_core.types import AnswerDelta, CallArguments, CallEnd, CallStart, Delta, MalformedCall, Message, Role, ToolCall

Schemas = Sequence[Mapping[str, object]]


def answer(
    content: str = "", reasoning: str | None = None, *calls: ToolCall, malformed: Sequence[MalformedCall] = ()
) -> Message:
    return Message(Role.ASSISTANT, content, reasoning=reasoning, tool_calls=calls, malformed_calls=malformed)


def parse(form: AnswerFormat, text: str, *, tools: Schemas = (), in_reasoning: bool = False) -> Message:
    return read(form, [text], tools=tools, in_reasoning=in_reasoning)[1]


def read(
    form: AnswerFormat, pieces: Iterable[str], *, tools: Schemas = (), in_reasoning: bool = False
) -> tuple[list[AnswerDelta], Message]:
    """All deltas and the message, after an assertion that they agree."""
    parser = form.parser(tools=tools, in_reasoning=in_reasoning)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    last, message = parser.finish()
    deltas += last
    assert_deltas_add_up(deltas, message)
    return deltas, message


def assert_deltas_add_up(deltas: Sequence[AnswerDelta], message: Message) -> None:
    for kind, expected in (("content", message.content), ("reasoning", message.reasoning or "")):
        text = "".join(delta.text for delta in deltas if isinstance(delta, Delta) and delta.kind == kind)
        assert text == expected, f"the deltas of {kind} do not add up to it"
    ends = [delta for delta in deltas if isinstance(delta, CallEnd)]
    assert [end.index for end in ends] == list(range(len(ends))), "calls do not end in order"
    assert [end.call for end in ends if isinstance(end.call, ToolCall)] == list(message.tool_calls)
    assert [end.call for end in ends if isinstance(end.call, MalformedCall)] == list(message.malformed_calls)
    for end in ends:
        if isinstance(end.call, ToolCall):
            _assert_call_adds_up(deltas, end.index, end.call)


def _assert_call_adds_up(deltas: Sequence[AnswerDelta], index: int, call: ToolCall) -> None:
    starts = [delta for delta in deltas if isinstance(delta, CallStart) and delta.index == index]
    assert [start.name for start in starts] == [call.name]
    text = "".join(delta.text for delta in deltas if isinstance(delta, CallArguments) and delta.index == index)
    assert json.loads(text) == call.arguments, "the deltas do not add up to the arguments"
