"""Reasoning in ``<think>`` and tool calls as JSON in ``<tool_call>``, the manner of Hermes and Qwen.

An answer is any number of ``<think>...</think>`` blocks, then content with calls in it. White space around a block of
reasoning, before a call and after the last one is layout, and dropped; all other text is content, verbatim. A call
that is not valid, or not complete when the answer ends, stays in the content with its tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn, TypeAlias

from slm_core.errors import SessionError
from slm_core.types import Delta, Message, Role, Segment, ToolCall

_THINK, _THINK_END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_CALL_KEYS = frozenset({"name", "arguments", "id", "type"})
_QUOTE_OR_END = re.compile(rf'"|{_CALL_END}')
_QUOTE_OR_ESCAPE = re.compile(r'"|\\')

_Kind: TypeAlias = Literal["content", "reasoning"]
_State: TypeAlias = Literal["prefilled", "start", "reasoning", "content", "call", "finished"]


def parse(text: str, *, may_be_in_reasoning: bool = False) -> Message:
    """Read a whole answer.

    Args:
        text: the answer.
        may_be_in_reasoning: the prompt may have ended with ``<think>``; it did if the first tag here is ``</think>``.
    """
    end = text.find(_THINK_END)
    in_reasoning = may_be_in_reasoning and end >= 0 and _THINK not in text[:end]
    parser = HermesParser(in_reasoning=in_reasoning)
    parser.feed(text)
    return parser.finish()[1]


def opens_reasoning(prompt: Sequence[Segment]) -> bool:
    """Whether a prompt ends with ``<think>``, so that the answer begins with reasoning."""
    return bool(prompt) and prompt[-1].control and prompt[-1].text.rstrip().endswith(_THINK)


class HermesParser:
    """A ``protocols.StreamParser`` for one answer.

    Args:
        in_reasoning: the prompt ended with ``<think>``, so the answer begins with reasoning.
    """

    def __init__(self, *, in_reasoning: bool = False) -> None:
        self._state: _State = "prefilled" if in_reasoning else "start"
        self._steps: dict[_State, Callable[[bool], bool]] = {
            "prefilled": lambda final: self._open_or("reasoning", final),  # some models repeat the opening tag
            "start": lambda final: self._open_or("content", final),
            "reasoning": self._reasoning,
            "content": self._content,
            "call": self._call,
        }
        self._buffer = ""
        self._space = ""  # white space that counts only if more text follows
        self._thought = in_reasoning
        self._block_is_empty = True
        self._after_call = False
        self._scan = 0  # how far the buffer was searched for the end of a call
        self._in_string = False  # whether the search stands within a JSON string
        self._strings_hide_tags = True
        self._deltas: list[Delta] = []
        self._parts: dict[_Kind, list[str]] = {"content": [], "reasoning": []}
        self._calls: list[ToolCall] = []

    def feed(self, text: str) -> list[Delta]:
        """Take a piece of the answer; returns what is now certain, in order.

        Raises:
            SessionError: after ``finish``.
        """
        if self._state == "finished":
            raise SessionError("this answer is finished (make a new parser for the next one)")
        self._buffer += text
        self._advance(final=False)
        return self._take()

    def finish(self) -> tuple[list[Delta], Message]:
        """The answer is over: what was held back, and the whole message.

        Raises:
            SessionError: called before.
        """
        deltas = self.feed("")
        self._advance(final=True)
        if self._state == "content" and not self._after_call:
            self._emit("content", self._space)
        self._state = "finished"
        content, reasoning = "".join(self._parts["content"]), "".join(self._parts["reasoning"])
        return deltas + self._take(), Message(Role.ASSISTANT, content, reasoning or None, tuple(self._calls))

    def _advance(self, *, final: bool) -> None:
        """Take steps until one needs more text; each returns whether there is more to do."""
        while self._steps[self._state](final):
            pass

    def _open_or(self, otherwise: _State, final: bool) -> bool:
        """Open a block of reasoning, or go on to ``otherwise`` where the text does not begin with one."""
        text = self._buffer.lstrip()
        if text.startswith(_THINK):
            self._buffer, self._state = text.removeprefix(_THINK), "reasoning"
            self._space = "\n" if self._parts["reasoning"] else ""
            self._thought = self._block_is_empty = True
            return True
        if _THINK.startswith(text) and not (final and self._buffer):
            return False
        self._buffer, self._state = text if self._thought else self._buffer, otherwise
        return True

    def _reasoning(self, final: bool) -> bool:
        text, tag = self._until(_THINK_END, final)
        self._write("reasoning", text.lstrip() if self._block_is_empty else text)
        self._block_is_empty = self._block_is_empty and not text.strip()
        if tag:
            self._state, self._space = "start", ""
        return bool(tag)

    def _content(self, final: bool) -> bool:
        text, tag = self._until(_CALL, final)
        self._write("content", text)
        if tag:
            self._state, self._scan, self._in_string = "call", 0, False
        return bool(tag)

    def _call(self, final: bool) -> bool:
        end = self._find_call_end()
        if end >= 0:
            self._close_call(self._buffer[:end], _CALL_END)
        elif final:
            self._close_last_call()
        return end >= 0 or final

    def _until(self, tag: str, final: bool) -> tuple[str, str]:
        """Take text up to ``tag``; without it, all that cannot be the beginning of one."""
        text, found, rest = self._buffer.partition(tag)
        self._buffer = rest if found or final else _unfinished(text, tag)
        return text.removesuffix(self._buffer) if not found else text, found

    def _find_call_end(self) -> int:
        """Where the closing tag begins, outside of JSON strings; -1 if it is not there yet."""
        if not self._strings_hide_tags:
            return self._buffer.find(_CALL_END)
        while True:
            pattern = _QUOTE_OR_ESCAPE if self._in_string else _QUOTE_OR_END
            found = pattern.search(self._buffer, self._scan)
            if found is None:
                unread = 0 if self._in_string else len(_CALL_END) - 1
                self._scan = max(self._scan, len(self._buffer) - unread)
                return -1
            if found.group() == _CALL_END:
                return found.start()
            if found.group() == '"':
                self._in_string = not self._in_string
                self._scan = found.end()
            elif found.end() == len(self._buffer):
                self._scan = found.start()
                return -1
            else:
                self._scan = found.end() + 1

    def _close_last_call(self) -> None:
        """The answer ends within a call that is whole but for its closing tag, or broken."""
        partial_tag = _unfinished(self._buffer, _CALL_END)
        body = self._buffer.removesuffix(partial_tag)
        if _decode(body) is not None:
            self._close_call(body, partial_tag)
        elif _CALL_END in self._buffer:  # a string that never ends hid the tag
            self._strings_hide_tags = False
            self._close_call(self._buffer.partition(_CALL_END)[0], _CALL_END)
        else:
            self._close_call(self._buffer, "")

    def _close_call(self, body: str, tag: str) -> None:
        """Take a call, with its closing tag, from the buffer: as a call if it is one, else as content."""
        self._buffer = self._buffer[len(body) + len(tag) :]
        self._state = "content"
        call = _decode(body)
        if call is None:
            self._write("content", _CALL + body + tag)
        else:
            self._calls.append(call)
            self._space, self._after_call = "", True

    def _write(self, kind: _Kind, text: str) -> None:
        """Put text out, but for white space at its end."""
        solid = text.rstrip()
        if solid:
            self._emit(kind, self._space + solid)
            self._space, self._after_call = "", False
        self._space += text[len(solid) :]

    def _emit(self, kind: _Kind, text: str) -> None:
        if not text:
            return
        self._parts[kind].append(text)
        if self._deltas and self._deltas[-1].kind == kind:
            text = self._deltas.pop().text + text
        self._deltas.append(Delta(kind, text))

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


def _unfinished(text: str, tag: str) -> str:
    """The end of ``text`` that may be the beginning of ``tag``."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return text[-length:]
    return ""


def _decode(body: str) -> ToolCall | None:
    """A call, or None where the text is not a valid one."""
    try:
        call = json.loads(body, parse_constant=_refuse_constant)
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict) or call.keys() - _CALL_KEYS:
        return None
    name, identity = call.get("name"), call.get("id")
    if not isinstance(name, str) or not name or not isinstance(identity, (str, type(None))):
        return None
    return ToolCall(name, arguments, identity)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
