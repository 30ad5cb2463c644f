"""Calls with the name before the arguments: ``NAME<separator>arguments``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from slm_core.types import CallFormat
from slm_formatters.parsers import json_text
from slm_formatters.parsers.json_calls import JsonCalls, read_object
from slm_formatters.parsers.output import Output
from slm_formatters.parsers.reader import Malformed, Markers, Reader, Steps
from slm_formatters.parsers.toolbox import Shape, Toolbox

if TYPE_CHECKING:
    from slm_formatters.parsers.answer import CallSyntax

_WORD = re.compile(r"""[^\s<>\[\]{}()"'=,|]+""")
_LONGEST_NAME = 512
_NUMBERED = re.compile(r"(?:functions\.)?(?P<name>.+):\d+")


class Field(Enum):
    """The fields of a header."""

    NAME = "name"
    ID = "id"
    NUMBERED = "name and number"
    """An id that contains the name: ``functions.NAME:0``."""


HeaderPart: TypeAlias = "str | Field | tuple[str | Field, ...]"
"""A literal, in which white space may vary; a field; or an optional group, which begins with a literal."""


class Arguments(Protocol):
    """The syntax of arguments."""

    def read(self, reader: Reader, output: Output, shape: Shape) -> Steps[bool]:
        """Read all arguments; ``shape`` is their schema.

        Returns:
            Whether the arguments have their own end, so that no argument can follow.

        Raises:
            Malformed: the arguments have another syntax.
        """
        ...


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """``Arguments`` as a JSON object, as a string with JSON text, or empty."""

    def read(self, reader: Reader, output: Output, shape: Shape) -> Steps[bool]:
        """Read all arguments."""
        char = yield from reader.next()
        if char == "{":
            yield from json_text.value(reader, output.arguments)
        elif char in ('"', "n") and char:
            output.arguments((yield from read_object(reader, char)))
        return char in ("{", '"', "n")


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """A ``CallBody`` of one call.

    Attributes:
        header: the syntax before the arguments.
        arguments: the syntax of the arguments.
        or_json: a call may also be JSON instead of the header.
    """

    header: tuple[HeaderPart, ...]
    arguments: Arguments = JsonArguments()
    or_json: bool = False

    @property
    def first(self) -> str:
        """The possible first characters of a call: unknown."""
        return ""

    def call_format(self, calls: CallSyntax | None) -> CallFormat | None:
        """The format of calls, for a grammar; only with JSON arguments and a literal between name and arguments."""
        at = self.header.index(Field.NAME) if Field.NAME in self.header else -1
        before, between = (("".join(map(str, parts))) for parts in (self.header[: max(at, 0)], self.header[at + 1 :]))
        plain = all(isinstance(part, str) and " " not in part for part in (*self.header[:at], *self.header[at + 1 :]))
        if calls is None or at < 0 or not plain or not isinstance(self.arguments, JsonArguments):
            return None
        return CallFormat(
            calls.begin, calls.end, "named", before=before, between=between, section=calls.section, repeats=True
        )

    def read(self, reader: Reader, output: Output, tools: Toolbox) -> Steps[bool]:
        """Read one call."""
        if self.or_json and (yield from reader.next()) in ("[", "{"):
            return (yield from JsonCalls().read(reader, output, tools))
        fields: dict[Field, str] = {}
        pieces: list[str | Field] = []
        for part in self.header:
            if isinstance(part, str | Field):
                pieces.append(part)
                continue
            yield from _read_pieces(reader, pieces, fields)
            yield from reader.space()
            pieces = list(part) if (yield from reader.begins(str(part[0]))) else []
        yield from _read_pieces(reader, pieces, fields)
        name, call_id = _identified(fields)
        output.start(name, call_id)
        return (yield from self.arguments.read(reader, output, tools.parameters(name)))


def _read_pieces(reader: Reader, pieces: Sequence[str | Field], fields: dict[Field, str]) -> Steps[None]:
    for piece, following in itertools.zip_longest(pieces, pieces[1:]):
        if isinstance(piece, str):
            yield from reader.expect(piece)
            continue
        yield from reader.space()
        end = following.split()[0] if isinstance(following, str) else ""
        if end and _WORD.match(end):
            parts: list[str] = []
            yield from reader.until(Markers([end]), parts.append)
            fields[piece] = "".join(parts).rstrip()
            if len(fields[piece]) > _LONGEST_NAME or not _WORD.fullmatch(fields[piece]):
                raise Malformed("expected a name")
        else:
            fields[piece] = yield from reader.match(_WORD, _LONGEST_NAME)


def _identified(fields: dict[Field, str]) -> tuple[str, str | None]:
    numbered = fields.get(Field.NUMBERED)
    if numbered is None:
        return fields.get(Field.NAME, ""), fields.get(Field.ID) or None
    match = _NUMBERED.fullmatch(numbered)
    if match is None:
        raise Malformed(f"expected functions.NAME:NUMBER, not {numbered!r}")
    return match["name"], numbered
