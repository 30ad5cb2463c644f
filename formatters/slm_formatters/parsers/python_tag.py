"""Llama's calls after ``<|python_tag|>``: JSON calls, a call of a built-in tool, or Python code to run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slm_core.types import CallFormat
from slm_formatters.parsers import json_text
from slm_formatters.parsers.json_calls import JsonCalls
from slm_formatters.parsers.output import Output
from slm_formatters.parsers.python_calls import read_arguments
from slm_formatters.parsers.reader import Markers, Reader, Steps
from slm_formatters.parsers.toolbox import Toolbox

if TYPE_CHECKING:
    from slm_formatters.parsers.answer import CallSyntax

_PATH = re.compile(r"[\w.]+")
_BUILT_IN = re.compile(r"(?P<name>\w+)\.call")


@dataclass(frozen=True, slots=True)
class PythonTag:
    """A ``CallBody``: ``{...}``, ``NAME.call(...)``, or code, which is the argument "code" of the tool "python".

    Attributes:
        ends: markers that end code.
    """

    ends: tuple[str, ...]

    @property
    def first(self) -> str:
        """The possible first characters of a call: any."""
        return ""

    def call_format(self, calls: CallSyntax | None) -> CallFormat | None:
        """None: ``CallFormat`` cannot describe code."""
        return None

    def read(self, reader: Reader, output: Output, tools: Toolbox) -> Steps[bool]:
        """Read one call, or several JSON calls, committing all but the last one."""
        if (yield from reader.next()) == "{":
            return (yield from JsonCalls().read(reader, output, tools))
        path = yield from reader.match(_PATH)
        built_in = _BUILT_IN.fullmatch(path)
        if built_in is not None and (yield from reader.peek()) == "(":
            output.start(built_in["name"])
            yield from read_arguments(reader, output)
            return True
        output.start("python")
        yield from read_code(reader, output, Markers(self.ends), path)
        return True


def read_code(reader: Reader, output: Output, ends: Markers, begin: str = "") -> Steps[None]:
    """Read code as the only argument of a call; ``begin`` is the code that was read already."""
    output.arguments('{"code": "')
    output.arguments(json_text.encode(begin)[1:-1])
    yield from reader.until(ends, lambda text: output.arguments(json_text.encode(text)[1:-1]))
    output.arguments('"}')
