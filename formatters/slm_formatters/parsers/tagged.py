"""Arguments with markers around each name and value, like XML, and mappings with bare keys."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slm_formatters.parsers import json_text, literals, values
from slm_formatters.parsers.output import Output
from slm_formatters.parsers.reader import Malformed, Markers, Reader, Sink, Steps
from slm_formatters.parsers.toolbox import Shape

_LONGEST_KEY = 512
_MAX_DEPTH = 64
_ELEMENT = re.compile(r"[^\s<>/]+")


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """``Arguments`` such as ``<parameter=KEY>VALUE</parameter>``. Values are text; the tool's schema restores types.

    Attributes:
        begin: the text before a key.
        key_end: the text between key and value; white space in it may vary.
        value_end: the text after a value. It ends a value only before another argument or the end of the call.
        text_key_end: replaces ``key_end`` before a text value; "" if the format does not mark text values.
        padded: values are on separate lines.
        closing: texts that may follow the last argument.
    """

    begin: str
    key_end: str
    value_end: str
    text_key_end: str = ""
    padded: bool = False
    closing: tuple[str, ...] = ()

    def read(self, reader: Reader, output: Output, shape: Shape) -> Steps[bool]:
        """Read all arguments."""
        before = "{"
        yield from reader.space()
        while (yield from reader.accept(self.begin)):
            name, is_text = yield from self._key(reader)
            output.arguments(f"{before}{json_text.encode(name)}: ")
            before = ", "
            if is_text or (is_text is None and values.is_text(shape.member(name))):
                output.arguments('"')
                yield from self._value(reader, lambda text: output.arguments(json_text.encode(text)[1:-1]))
                output.arguments('"')
            else:
                parts: list[str] = []
                yield from self._value(reader, parts.append)
                value_shape = Shape({}, {}) if is_text is False else shape.member(name)
                output.arguments(json_text.encode(values.restore("".join(parts), value_shape)))
            yield from reader.space()
        output.arguments("{}" if before == "{" else "}")
        return False

    def _key(self, reader: Reader) -> Steps[tuple[str, bool | None]]:
        """The key, and whether the value is marked as text; None if the format does not mark text values."""
        first, text_first = self.key_end.split(), self.text_key_end.split()
        parts: list[str] = []
        marker = yield from reader.until(Markers([first[0]]), parts.append)
        name = "".join(parts).strip()
        if not marker or not name or len(name) > _LONGEST_KEY:
            raise Malformed("an argument without a name")
        reader.take(reader.at + len(marker))
        for word, text_word in zip(first[1:], text_first[1:] or first[1:], strict=True):
            yield from reader.space()
            if word != text_word and (yield from reader.accept(text_word)):
                return name, True
            yield from reader.expect(word)
        return name, False if self.text_key_end else None

    def _value(self, reader: Reader, sink: Sink) -> Steps[None]:
        end = Markers([self.value_end])
        text = _Unpadded(sink) if self.padded else _Verbatim(sink)
        follows = (self.begin, *self.closing)
        while (yield from reader.until(end, text.add)):
            after = reader.take(reader.at + len(self.value_end)) + (yield from reader.space())
            if not (yield from reader.peek()) or (yield from _begins_any(reader, follows)):
                return
            text.add(after)
        raise Malformed("the answer ends within an argument")


class _Verbatim:
    def __init__(self, sink: Sink) -> None:
        self.add = sink


class _Unpadded:
    """Removes one line break at the beginning and one at the end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._at_start = True
        self._line_break = ""

    def add(self, text: str) -> None:
        if self._at_start and text:
            text, self._at_start = text.removeprefix("\n"), False
        text = self._line_break + text
        self._line_break = "\n" if text.endswith("\n") else ""
        if text := text.removesuffix("\n"):
            self._sink(text)


def _begins_any(reader: Reader, literals_: tuple[str, ...]) -> Steps[bool]:
    for literal in literals_:
        if (yield from reader.begins(literal)):
            return True
    return False


@dataclass(frozen=True, slots=True)
class BareKeyArguments:
    """``Arguments`` such as ``{key:<|"|>text<|"|>,other:1}``: a mapping with bare keys and marked strings.

    Attributes:
        quote: the text before and after a string.
    """

    quote: str

    def read(self, reader: Reader, output: Output, shape: Shape) -> Steps[bool]:
        """Read all arguments."""
        if (yield from reader.next()) != "{":
            raise Malformed("expected '{'")
        reader.take(reader.at + 1)
        before = "{"
        while (yield from reader.next()) != "}":
            name = yield from literals.key(reader, self.quote)
            yield from reader.expect(":")
            value = yield from literals.value(reader, self.quote)
            output.arguments(f"{before}{json_text.encode(name)}: {json_text.encode(value)}")
            before = ", "
            yield from literals.separator(reader, "}")
        reader.take(reader.at + 1)
        output.arguments("{}" if before == "{" else "}")
        return True


@dataclass(frozen=True, slots=True)
class NestedArguments:
    """``Arguments`` as elements with the keys as names, which contain values, lists and mappings of elements.

    Attributes:
        mark: the text before each tag, so that text in values cannot be a tag.
        item: the name of list items.
    """

    mark: str
    item: str = "item"

    def read(self, reader: Reader, output: Output, shape: Shape) -> Steps[bool]:
        """Read all arguments."""
        before = "{"
        while (name := (yield from self._open(reader))) is not None:
            value = yield from self._element(reader, name, shape.member(name), 1)
            output.arguments(f"{before}{json_text.encode(name)}: {json_text.encode(value)}")
            before = ", "
        output.arguments("{}" if before == "{" else "}")
        return False

    def _open(self, reader: Reader) -> Steps[str | None]:
        """Read an opening tag; returns its name, or None if there is none."""
        yield from reader.space()
        start = yield from reader.begins(self.mark + "<")
        if not start or (yield from reader.begins(self.mark + "</")):
            return None
        reader.take(reader.at + len(self.mark) + 1)
        name = yield from reader.match(_ELEMENT, _LONGEST_KEY)
        yield from reader.expect(">")
        return name

    def _element(self, reader: Reader, name: str, shape: Shape, depth: int) -> Steps[object]:
        """The value of an element, up to its closing tag."""
        if depth > _MAX_DEPTH:
            raise Malformed(f"nested deeper than {_MAX_DEPTH}")
        closing = f"{self.mark}</{name}>"
        parts = [(yield from reader.space())]
        if not (yield from reader.begins(closing)) and (yield from reader.begins(self.mark + "<")):
            return (yield from self._members(reader, closing, shape, depth))
        tags = Markers([self.mark or "<"])
        while (yield from reader.until(tags, parts.append)) and not (yield from reader.begins(closing)):
            parts.append(reader.take(reader.at + 1))
        yield from reader.expect(closing)
        return values.restore("".join(parts), shape)

    def _members(self, reader: Reader, closing: str, shape: Shape, depth: int) -> Steps[object]:
        """The elements within an element, up to its closing tag."""
        members: list[tuple[str, object]] = []
        while (inner := (yield from self._open(reader))) is not None:
            member_shape = shape.item() if inner == self.item and "object" not in shape.types else shape.member(inner)
            members.append((inner, (yield from self._element(reader, inner, member_shape, depth + 1))))
        yield from reader.expect(closing)
        is_list = all(inner == self.item for inner, _ in members) and "object" not in shape.types
        return [value for _, value in members] if is_list else dict(members)
