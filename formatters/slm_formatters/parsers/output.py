"""The output of a parser: deltas, and the message of all deltas."""

from __future__ import annotations

from typing import Literal, TypeAlias

from slm_core.types import AnswerDelta, CallArguments, CallEnd, CallStart, Delta, MalformedCall, Message, Role, ToolCall
from slm_formatters.parsers import json_text
from slm_formatters.parsers.reader import Malformed

_Kind: TypeAlias = Literal["content", "reasoning"]


class Output:
    """Collects an answer.

    White space at the end of a text is kept only if more text follows: around reasoning and calls it is layout.
    """

    def __init__(self) -> None:
        self._deltas: list[AnswerDelta] = []
        self._growing: _Kind | Literal["arguments"] = "content"  # the kind of the open delta
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
        """Add content."""
        self._write("content", text)

    def reasoning(self, text: str) -> None:
        """Add reasoning; white space at the beginning of a block is layout."""
        if self._in_empty_block:
            text = text.lstrip()
            if not text:
                return
            self._space = ["\n"] if self._parts["reasoning"] else []
            self._in_empty_block = False
        self._write("reasoning", text)

    def open_reasoning(self) -> None:
        """Begin a block of reasoning; a second block begins on a new line."""
        self._in_empty_block = True
        self.layout()

    def open_content(self) -> None:
        """Begin a block of content; a second block begins on a new line."""
        if self._parts["content"]:
            self._space, self._after_layout = ["\n"], True

    def layout(self) -> None:
        """Treat white space before this point, and after it at the end of the answer, as layout."""
        self._space, self._after_layout = [], True

    # Calls.

    @property
    def in_call(self) -> bool:
        """Whether a call is open."""
        return self._name is not None

    def start(self, name: str, call_id: str | None = None) -> None:
        """Begin a call.

        Raises:
            Malformed: another call is open, or the name is empty.
        """
        if self.in_call or not name:
            raise Malformed("a call within a call" if name else "the call has no name")
        self._name, self._id = name, call_id
        self._push(CallStart(self._index, name, call_id))

    def identify(self, call_id: str) -> None:
        """Set the call's id, if it comes after the arguments."""
        self._id = call_id

    def arguments(self, text: str) -> None:
        """Add JSON text of the call's arguments."""
        if text:
            self._arguments.append(text)
            self._grow("arguments", text)

    def commit(self) -> None:
        """End the call.

        Raises:
            Malformed: no call is open, or its arguments are not a JSON object.
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
        """Record a malformed call."""
        call = MalformedCall(text, reason)
        self._end_call(call)
        self._malformed.append(call)

    # The result.

    def take(self) -> list[AnswerDelta]:
        """The deltas since the last ``take``."""
        self._flush()
        deltas, self._deltas = self._deltas, []
        return deltas

    def end(self) -> Message:
        """End the answer; returns the message."""
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
