"""A streaming JSON reader: passes each piece on when it is known to continue a valid value."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from slm_formatters.parsers.reader import Malformed, Reader, Sink, Steps

MAX_DEPTH = 200
_IN_STRING = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[-+.\w]+")
_CONTROL = re.compile(r"[\x00-\x1f]")


def decode(text: str) -> object:
    """The value of a JSON text.

    Raises:
        Malformed: the text is not valid JSON.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not valid JSON: {error}") from error


def encode(value: object) -> str:
    """The JSON text of a value."""
    return json.dumps(value, ensure_ascii=False)


def string(reader: Reader) -> Steps[str]:
    """Read a JSON string; returns its value."""
    if (yield from reader.next()) != '"':
        raise Malformed("expected a string")
    parts: list[str] = []
    yield from _string(reader, parts.append)
    return str(decode("".join(parts)))


def value(reader: Reader, sink: Sink) -> Steps[None]:
    """Read one value and pass its text on.

    Control characters in strings, which models write and JSON forbids, are escaped.

    Raises:
        Malformed: the text is not the beginning of a value, or ends inside the value.
    """
    closing: list[str] = []  # of the open lists and mappings, innermost last
    expected = "value"
    while True:
        sink((yield from reader.space()))
        char = yield from reader.peek()
        if closing and char == closing[-1] and expected in ("first value", "first key", "comma"):
            sink(reader.take(reader.at + 1))
            closing.pop()
            expected = "comma"
        elif expected.endswith("value") and char in ("{", "["):
            sink(reader.take(reader.at + 1))
            closing.append("}" if char == "{" else "]")
            expected = "first key" if char == "{" else "first value"
        elif char == '"' and expected.endswith(("value", "key")):
            yield from _string(reader, sink)
            expected = "colon" if expected.endswith("key") else "comma"
        elif expected.endswith("value") and _SCALAR.match(char):
            sink((yield from reader.match(_SCALAR)))
            expected = "comma"
        elif expected == "colon" and char == ":":
            sink(reader.take(reader.at + 1))
            expected = "value"
        elif closing and expected == "comma" and char == ",":
            sink(reader.take(reader.at + 1))
            expected = "key" if closing[-1] == "}" else "value"
        else:
            raise Malformed(f"not valid JSON at {char!r}" if char else "the answer ends within JSON")
        if not closing:
            return
        if len(closing) > MAX_DEPTH:
            raise Malformed(f"nested deeper than {MAX_DEPTH}")


def _string(reader: Reader, sink: Sink) -> Steps[None]:
    sink(reader.take(reader.at + 1))
    while True:
        text = yield from _chunk(reader)
        sink(_CONTROL.sub(_escape, text))
        if text == '"':
            return


def _chunk(reader: Reader) -> Steps[str]:
    """A piece of a string: an escape, the closing quote, or the other characters that have arrived."""
    char = yield from reader.peek()
    if char == "\\":
        if len((yield from reader.peek(2))) == 2:
            return reader.take(reader.at + 2)
        reader.take(len(reader.text))
        char = ""
    if not char:
        raise Malformed("the answer ends within a string")
    if char == '"':
        return reader.take(reader.at + 1)
    match = _IN_STRING.match(reader.text, reader.at)
    assert match is not None
    return reader.take(match.end())


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match.group()):04x}"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
