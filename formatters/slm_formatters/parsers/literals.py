"""A streaming reader of Python literals; JSON's spellings are accepted, too."""

from __future__ import annotations

import re

from slm_formatters.parsers.reader import Malformed, Markers, Reader, Steps

_MAX_DEPTH = 64
_WORD = re.compile(r"[-+.\w]+")
_NAMES: dict[str, object] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_KEY = re.compile(r"[^\s:,={}\[\]()<>\"']+")
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def decode(text: str) -> object:
    """The value of a text.

    Raises:
        Malformed: the text is not a literal.
    """
    reader = Reader()
    reader.add(text)
    reader.final = True
    steps = value(reader)
    try:
        next(steps)
    except StopIteration as stop:
        result: object = stop.value
        if reader.at < len(text) and text[reader.at :].strip():
            raise Malformed("text after the value") from None
        return result
    raise AssertionError("a reader that has it all needs no more")


def value(reader: Reader, quote: str = "", depth: int = 0) -> Steps[object]:
    """Read one value.

    Args:
        reader: the reader.
        quote: the text that begins and ends a verbatim string; "" for Python's strings.
        depth: the nesting depth of the value.

    Raises:
        Malformed: there is no value, or it nests too deep.
    """
    if depth > _MAX_DEPTH:
        raise Malformed(f"nested deeper than {_MAX_DEPTH}")
    char = yield from reader.next()
    if char == "{":
        return (yield from _mapping(reader, quote, depth))
    if char and char in "[(":
        return (yield from _list(reader, _CLOSING[char], quote, depth))
    if quote and (yield from reader.accept(quote)):
        return (yield from _verbatim(reader, quote))
    if not quote and char and char in "'\"":
        return (yield from _string(reader, char))
    return _scalar((yield from reader.match(_WORD)))


def _list(reader: Reader, closing: str, quote: str, depth: int) -> Steps[list[object]]:
    reader.take(reader.at + 1)
    values = []
    while (yield from reader.next()) != closing:
        values.append((yield from value(reader, quote, depth + 1)))
        yield from separator(reader, closing)
    reader.take(reader.at + 1)
    return values


def _mapping(reader: Reader, quote: str, depth: int) -> Steps[dict[str, object]]:
    reader.take(reader.at + 1)
    values: dict[str, object] = {}
    while (yield from reader.next()) != "}":
        name = yield from key(reader, quote)
        yield from reader.expect(":")
        values[name] = yield from value(reader, quote, depth + 1)
        yield from separator(reader, "}")
    reader.take(reader.at + 1)
    return values


def key(reader: Reader, quote: str = "") -> Steps[str]:
    """Read the key of a mapping, with or without quotes."""
    char = yield from reader.next()
    if quote and (yield from reader.accept(quote)):
        return (yield from _verbatim(reader, quote))
    if char and char in "'\"":
        return (yield from _string(reader, char))
    name = yield from reader.match(_KEY)
    if not name:
        raise Malformed("expected a key")
    return name


def separator(reader: Reader, closing: str) -> Steps[None]:
    """Read a comma, which may be missing before the closing bracket."""
    char = yield from reader.next()
    if char == ",":
        reader.take(reader.at + 1)
    elif char != closing:
        raise Malformed(f"expected ',' or {closing!r}" if char else "the answer ends within the arguments")


def _verbatim(reader: Reader, quote: str) -> Steps[str]:
    parts: list[str] = []
    if not (yield from reader.until(Markers([quote]), parts.append)):
        raise Malformed("the answer ends within a string")
    reader.take(reader.at + len(quote))
    return "".join(parts)


def _string(reader: Reader, quote: str) -> Steps[str]:
    if (yield from reader.begins(quote * 3)):
        quote *= 3
    reader.take(reader.at + len(quote))
    ends = Markers([quote, "\\"])
    parts: list[str] = []
    while (end := (yield from reader.until(ends, parts.append))) == "\\":
        parts.append((yield from _escaped(reader)))
    if not end:
        raise Malformed("the answer ends within a string")
    reader.take(reader.at + len(quote))
    return _SURROGATES.sub(lambda pair: pair.group().encode("utf-16", "surrogatepass").decode("utf-16"), "".join(parts))


def _escaped(reader: Reader) -> Steps[str]:
    char = (yield from reader.peek(2))[1:]
    if char not in _HEX:
        reader.take(min(reader.at + 2, len(reader.text)))
        return _ESCAPES.get(char, char if char in ("'", '"', "\\") else "\\" + char)
    digits = (yield from reader.peek(2 + _HEX[char]))[2:]
    reader.take(reader.at + 2 + len(digits))
    try:
        return chr(int(digits, 16))
    except (ValueError, OverflowError) as error:
        raise Malformed(f"not a character: \\{char}{digits}") from error


def _scalar(word: str) -> object:
    if word in _NAMES:
        return _NAMES[word]
    if not _NUMBER.fullmatch(word):
        raise Malformed(f"not a value: {word!r}" if word else "expected a value")
    try:
        return float(word) if any(char in word for char in ".eE") else int(word)
    except ValueError as error:
        raise Malformed(f"not a number: {error}") from error
