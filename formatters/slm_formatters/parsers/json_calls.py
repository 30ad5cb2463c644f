"""Calls that are JSON objects, in a list or one after another: ``{"name": ..., "arguments": {...}}``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from slm_core.types import CallFormat
from slm_formatters.parsers import json_text
from slm_formatters.parsers.output import Output
from slm_formatters.parsers.reader import Malformed, Reader, Steps
from slm_formatters.parsers.toolbox import Toolbox

if TYPE_CHECKING:
    from slm_formatters.parsers.answer import CallSyntax

NAMES = frozenset({"name", "tool_name", "function_name", "function"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters", "args"})
ID_KEYS = frozenset({"id", "tool_call_id", "call_id"})


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """A ``CallBody``.

    Attributes:
        name: key of the name, in addition to the usual keys.
        arguments: key of the arguments, in addition to the usual keys; the value is an object, or its JSON text.
        id: key of the id, in addition to the usual keys.
        keyed: any other key is the name, and its value the arguments.
        bare: calls have no markers, so an object is a call only with the name of a known tool.
        listed: templates write them in a list; both are read.
        wrapped: templates write them within ``{"type": "function", "function": ...}``; both are read.
    """

    name: str = "name"
    arguments: str = "arguments"
    id: str = "id"
    keyed: bool = False
    bare: bool = False
    listed: bool = False
    wrapped: bool = False

    def normal(self) -> JsonCalls:
        """An equivalent syntax with the usual keys, if possible."""
        return replace(
            self,
            name="name" if self.name in NAMES else self.name,
            arguments="arguments" if self.arguments in ARGUMENT_KEYS else self.arguments,
            id="id" if self.id in ID_KEYS else self.id,
            listed=False,
            wrapped=False,
        )

    def call_format(self, calls: CallSyntax | None) -> CallFormat | None:
        """The format of calls, for a grammar."""
        if self.keyed or self.wrapped:
            return None
        begin, end, section = ("", "", ("", "")) if calls is None else (calls.begin, calls.end, calls.section)
        style: Literal["object", "array"] = "array" if self.listed else "object"
        repeats = bool(end) and not self.listed
        return CallFormat(begin, end, style, self.name, self.arguments, section=section, repeats=repeats)

    @property
    def first(self) -> str:
        """The possible first characters of a call."""
        return "{["

    def read(self, reader: Reader, output: Output, tools: Toolbox) -> Steps[bool]:
        """Read one or more calls, committing all but the last one."""
        in_list = (yield from reader.next()) == "["
        if in_list:
            reader.take(reader.at + 1)
        while True:
            yield from _Call(self, reader, output, tools).read()
            char = yield from reader.next()
            if char in (",", ";") and not (char == ";" and in_list):
                reader.take(reader.at + 1)
            elif in_list and char == "]":
                reader.take(reader.at + 1)
                return True
            elif in_list:
                raise Malformed("expected ',' or ']' after a call")
            if (yield from reader.next()) != "{":
                return True
            output.commit()
            reader.restart()


class _Call:
    """One object. Its members may have any order; arguments stream when the name is known."""

    def __init__(self, form: JsonCalls, reader: Reader, output: Output, tools: Toolbox) -> None:
        self._form = form
        self._reader = reader
        self._output = output
        self._tools = tools
        self._name: str | None = None
        self._id: str | None = None
        self._early_arguments: str | None = None  # arguments that came before the name
        self._wrapped = False

    def read(self) -> Steps[None]:
        yield from self._members()
        if not self._output.in_call:
            if self._form.bare and self._early_arguments is None:
                raise Malformed("the call has no arguments")
            self._start()
            self._output.arguments(self._early_arguments or "")
        if self._id is not None:
            self._output.identify(self._id)

    def _members(self) -> Steps[None]:
        yield from self._reader.expect("{")
        closing = yield from self._reader.next()
        if closing != "}":
            closing = ","
            while closing == ",":
                yield from self._reader.space()
                key = yield from json_text.string(self._reader)
                yield from self._reader.expect(":")
                yield from self._member(key)
                closing = yield from self._reader.next()
                if closing == ",":
                    self._reader.take(self._reader.at + 1)
        yield from self._reader.expect("}")

    def _member(self, key: str) -> Steps[None]:
        char = yield from self._reader.next()
        if key == "function" and char == "{" and not self._wrapped:
            self._wrapped = True
            yield from self._members()
        elif key in ARGUMENT_KEYS or key == self._form.arguments:
            yield from self._arguments(char)
        elif key in NAMES or key == self._form.name:
            self._set_name((yield from json_text.string(self._reader)))
        elif key in ID_KEYS or key == self._form.id:
            self._id = yield from self._identity(char)
        elif key == "type":
            yield from json_text.string(self._reader)
        elif self._form.keyed:
            self._set_name(key)
            yield from self._arguments(char)
        else:
            raise Malformed(f"a call has no key {key!r}")

    def _set_name(self, name: str) -> None:
        if self._name is not None:
            raise Malformed("the call has two names")
        self._name = name

    def _identity(self, char: str) -> Steps[str | None]:
        if char == '"':
            return (yield from json_text.string(self._reader))
        parts: list[str] = []
        yield from json_text.value(self._reader, parts.append)
        value = json_text.decode("".join(parts))
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise Malformed("the call's id is not a text")
        return None if value is None else str(value)

    def _arguments(self, char: str) -> Steps[None]:
        if self._output.in_call or self._early_arguments is not None:
            raise Malformed("the call has two sets of arguments")
        if self._name is not None and char == "{":
            self._start()
            yield from json_text.value(self._reader, self._output.arguments)
            return
        self._early_arguments = yield from read_object(self._reader, char)
        if self._name is not None:
            self._start()
            self._output.arguments(self._early_arguments)

    def _start(self) -> None:
        if self._name is None:
            raise Malformed("the call has no name")
        if self._form.bare and not self._tools.may_be(self._name):
            raise Malformed(f"there is no tool {self._name!r}")
        self._output.start(self._name, self._id)


def read_object(reader: Reader, char: str) -> Steps[str]:
    """Read an object, a string with JSON text of an object, or ``null``; returns JSON text of the object."""
    parts: list[str] = []
    if char == '"':
        parts.append((yield from json_text.string(reader)))
    else:
        yield from json_text.value(reader, parts.append)
    text = "".join(parts)
    value = json_text.decode(text)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Malformed("the arguments are not a JSON object")
    return text
