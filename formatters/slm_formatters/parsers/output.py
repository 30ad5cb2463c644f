"""What a parser has read so far: deltas to hand out, and the message that they add up to."""

from __future__ import annotations

from typing import Literal, TypeAlias

from slm_core.types import AnswerDelta, CallArguments, CallEnd, CallStart, Delta, MalformedCall, Message, Role, ToolCall
from slm_formatters.parsers import json_text
from slm_formatters.parsers.reader import Malformed

_Kind: TypeAlias = Literal["content", "reasoning"]


class Output:
    """Collects an answer.

    White space at the end of a text counts only if more text follows: around reasoning and calls it is layout.
    """

    def __init__(self) -> None:
        self._deltas: list[AnswerDelta] = []
        self._growing: _Kind | Literal["arguments"] = "content"  # the delta that is still being joined
        self._pieces: list[str] = []
        self._parts: dict[_Kind, list[str]] = {"content": [], "reasoning": []}
        self._space: list[str] = []
        self._after_layout = False
        self._calls: list[ToolCall] = []
        self._malformed: list[MalformedCall] = []
        self._in_empty_block = False
        self._name: str | None = None
        self._id: str | None = None
        self._arguments: list[str] = []

    # Text.

    def content(self, text: str) -> None:
        """More content."""
        self._write("content", text)

    def reasoning(self, text: str) -> None:
        """More reasoning; white space at the beginning of a block is layout."""
        if self._in_empty_block:
            text = text.lstrip()
            if not text:
                return
            self._space = ["\n"] if self._parts["reasoning"] else []
            self._in_empty_block = False
        self._write("reasoning", text)

    def open_reasoning(self) -> None:
        """A block of reasoning begins; one after another begins on a line of its own."""
        self._in_empty_block = True
        self.layout()

    def open_content(self) -> None:
        """A block of content begins; one after another begins on a line of its own."""
        if self._parts["content"]:
            self._space, self._after_layout = ["\n"], True

    def layout(self) -> None:
        """The white space before this is layout, and so is what follows at the end of the answer."""
        self._space, self._after_layout = [], True

    # Calls.

    @property
    def in_call(self) -> bool:
        """Whether a call has started and is not over."""
        return self._name is not None

    def start(self, name: str, call_id: str | None = None) -> None:
        """A call begins.

        Raises:
            Malformed: another has begun, or it has no name.
        """
        if self.in_call or not name:
            raise Malformed("a call within a call" if name else "the call has no name")
        self._name, self._id = name, call_id
        self._push(CallStart(self._index, name, call_id))

    def identify(self, call_id: str) -> None:
        """The call's id, where it comes after its arguments."""
        self._id = call_id

    def arguments(self, text: str) -> None:
        """More of the JSON text of the call's arguments."""
        if text:
            self._arguments.append(text)
            self._grow("arguments", text)

    def commit(self) -> None:
        """The call is whole.

        Raises:
            Malformed: there is none, or its arguments are not a JSON object.
        """
        if self._name is None:
            raise Malformed("there is no call")
        if not self._arguments:
            self.arguments("{}")
        arguments = json_text.decode("".join(self._arguments))
        if not isinstance(arguments, dict):
            raise Malformed("the arguments are not a JSON object")
        call = ToolCall(self._name, arguments, self._id)
        self._end_call(call)
        self._calls.append(call)

    def malformed(self, text: str, reason: str) -> None:
        """What began like a call is none."""
        call = MalformedCall(text, reason)
        self._end_call(call)
        self._malformed.append(call)

    # The result.

    def take(self) -> list[AnswerDelta]:
        """The deltas since the last time."""
        self._flush()
        deltas, self._deltas = self._deltas, []
        return deltas

    def end(self) -> Message:
        """The answer is over."""
        if not self._after_layout:
            self._emit("content", "".join(self._space))
        return Message(
            Role.ASSISTANT,
            "".join(self._parts["content"]),
            reasoning="".join(self._parts["reasoning"]) or None,
            tool_calls=self._calls,
            malformed_calls=self._malformed,
        )

    @property
    def _index(self) -> int:
        return len(self._calls) + len(self._malformed)

    def _end_call(self, call: ToolCall | MalformedCall) -> None:
        self._push(CallEnd(self._index, call))
        self._name, self._id, self._arguments = None, None, []
        self.layout()

    def _write(self, kind: _Kind, text: str) -> None:
        if self._after_layout and kind == "content" and not self._parts["content"]:
            text, self._space = text.lstrip(), []
        solid = text.rstrip()
        if solid:
            self._emit(kind, "".join(self._space) + solid)
            self._space, self._after_layout = [], kind == "reasoning"
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])

    def _emit(self, kind: _Kind, text: str) -> None:
        if text:
            self._parts[kind].append(text)
            self._grow(kind, text)

    def _grow(self, kind: _Kind | Literal["arguments"], text: str) -> None:
        if kind != self._growing:
            self._flush()
            self._growing = kind
        self._pieces.append(text)

    def _push(self, delta: AnswerDelta) -> None:
        self._flush()
        self._deltas.append(delta)

    def _flush(self) -> None:
        if not self._pieces:
            return
        text, self._pieces = "".join(self._pieces), []
        if self._growing == "arguments":
            self._deltas.append(CallArguments(self._index, text))
        else:
            self._deltas.append(Delta(self._growing, text))
