"""Calls in Python syntax: ``[first(a="x", b=1), second()]``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slm_core.types import CallFormat
from slm_formatters.parsers import json_text, literals
from slm_formatters.parsers.output import Output
from slm_formatters.parsers.reader import Malformed, Reader, Steps
from slm_formatters.parsers.toolbox import Toolbox

if TYPE_CHECKING:
    from slm_formatters.parsers.answer import CallSyntax

_NAME = re.compile(r"[\w.\-/:]+")


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """A ``CallBody``: calls in a list, or one after another.

    Attributes:
        bare: calls have no markers, so only lists of calls of known tools are calls.
    """

    bare: bool = False

    @property
    def first(self) -> str:
        """The possible first characters of a call."""
        return "["

    def call_format(self, calls: CallSyntax | None) -> CallFormat | None:
        """None: ``CallFormat`` cannot describe Python calls."""
        return None

    def read(self, reader: Reader, output: Output, tools: Toolbox) -> Steps[bool]:
        """Read one or more calls, committing all but the last one."""
        in_list = (yield from reader.next()) == "["
        if in_list:
            reader.take(reader.at + 1)
        while True:
            yield from self._call(reader, output, tools)
            char = yield from reader.next()
            if in_list and char == "]":
                reader.take(reader.at + 1)
                return True
            if in_list:
                yield from literals.separator(reader, "]")
            elif char == ";":
                reader.take(reader.at + 1)
            if not _NAME.match((yield from reader.next())):
                return not in_list
            output.commit()
            reader.restart()

    def _call(self, reader: Reader, output: Output, tools: Toolbox) -> Steps[None]:
        name = yield from _name(reader)
        printed = name == "print"  # gemma prints the results of its calls
        if printed:
            reader.take(reader.at + 1)
            name = yield from _name(reader)
        if self.bare and not tools.may_be(name):
            raise Malformed(f"there is no tool {name!r}")
        output.start(name)
        yield from read_arguments(reader, output)
        if printed:
            yield from reader.expect(")")


def _name(reader: Reader) -> Steps[str]:
    yield from reader.space()
    name = yield from reader.match(_NAME, 512)
    if (yield from reader.next()) != "(":
        raise Malformed("expected NAME(ARGUMENTS)")
    return name


def read_arguments(reader: Reader, output: Output) -> Steps[None]:
    """Read ``(KEY=VALUE, ...)``."""
    reader.take(reader.at + 1)
    before = "{"
    while (yield from reader.next()) != ")":
        name = yield from literals.key(reader)
        if (yield from reader.next()) != "=":
            raise Malformed("an argument without a name")
        reader.take(reader.at + 1)
        value = yield from literals.value(reader)
        output.arguments(f"{before}{json_text.encode(name)}: {json_text.encode(value)}")
        before = ", "
        yield from literals.separator(reader, ")")
    reader.take(reader.at + 1)
    output.arguments("{}" if before == "{" else "}")
