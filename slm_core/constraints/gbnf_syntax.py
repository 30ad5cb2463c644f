"""A parser for GBNF, llama.cpp's notation for grammars."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from slm_core.errors import ConstraintError

LAST = 0x10FFFF
_WORD = re.compile(r"[a-zA-Z0-9-]+")
_INTEGER = re.compile(r"[0-9]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_OR_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_MOST_REPEATS = 100_000


@dataclass(frozen=True, slots=True, eq=False)
class Chars:
    """One character.

    Attributes:
        ranges: first and last code points, sorted, not adjacent, without surrogates.
    """

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Ref:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Seq:
    """A sequence of items; empty for the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Alt:
    """One of the items."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """An item ``least`` to ``most`` times; None for no maximum."""

    item: Node
    least: int
    most: int | None


Node: TypeAlias = Chars | Ref | Seq | Alt | Repeat


def parse(text: str, root: str, depth: int) -> dict[str, Node]:
    """Parse the rules of a grammar, by name.

    Args:
        text: the grammar.
        root: a rule that the grammar must contain.
        depth: how deep groups may nest.

    Raises:
        ConstraintError: the grammar is invalid; with line and column.
    """
    return _Parser(text, depth).grammar(root)


class _Parser:
    def __init__(self, text: str, depth: int) -> None:
        self._text = text
        self._depth = depth
        self._at = 0
        self._refs: dict[str, int] = {}  # rule name to the position of its first use

    def grammar(self, root: str) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._space(lines=True)
        while self._at < len(self._text):
            start = self._at
            name = self._match(_WORD, "a rule's name")
            if name in rules:
                self._fail(f"rule {name!r} is defined twice", start)
            self._space(lines=False)
            if not self._take("::="):
                self._fail("expected '::='")
            self._space(lines=True)
            rules[name] = self._alternatives(0)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                self._fail("expected an item, '|' or the end of the line")
            self._space(lines=True)
        for name, at in self._refs.items():
            if name not in rules:
                self._fail(f"there is no rule {name!r}", at)
        if root not in rules:
            raise ConstraintError(f"the grammar has no rule {root!r} (it has {', '.join(rules) or 'none'})")
        return rules

    def _alternatives(self, depth: int) -> Node:
        if depth > self._depth:
            self._fail(f"groups nest deeper than {self._depth}")
        items = [self._sequence(depth)]
        while self._take("|"):
            self._space(lines=True)
            items.append(self._sequence(depth))
        return items[0] if len(items) == 1 else Alt(tuple(items))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while (item := self._item(depth)) is not None:
            self._space(lines=depth > 0)
            items.append(self._repeated(item, lines=depth > 0))
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _item(self, depth: int) -> Node | None:
        start = self._at
        if self._take('"'):
            return self._literal()
        if self._take("["):
            return self._char_class(start)
        if self._take("."):
            return Chars(complement(()))
        if self._take("("):
            self._space(lines=True)
            inner = self._alternatives(depth + 1)
            if not self._take(")"):
                self._fail("expected ')'")
            return inner
        if self._peek() in ("<", "!"):
            self._fail("tokens in a grammar are not supported: spell their text, or use Lark")
        if self._peek() in ("*", "+", "?", "{"):
            self._fail(f"expected an item before {self._peek()!r}")
        word = _WORD.match(self._text, self._at)
        if word is None:
            return None
        self._at = word.end()
        self._refs.setdefault(word[0], start)
        return Ref(word[0])

    def _repeated(self, item: Node, *, lines: bool) -> Node:
        """An item with its repetition operators; several operators apply one after another."""
        n_signs = -1
        while True:
            start, n_signs = self._at, n_signs + 1
            if n_signs > self._depth:
                self._fail(f"more than {self._depth} signs of repetition at one item")
            if self._take("*"):
                item = Repeat(item, 0, None)
            elif self._take("+"):
                item = Repeat(item, 1, None)
            elif self._take("?"):
                item = Repeat(item, 0, 1)
            elif self._take("{"):
                item = self._counted(item, start)
            else:
                return item
            self._space(lines=lines)

    def _counted(self, item: Node, start: int) -> Node:
        self._space(lines=True)
        least = self._integer()
        most: int | None = least
        self._space(lines=True)
        if self._take(","):
            self._space(lines=True)
            most = None if self._peek() == "}" else self._integer()
            self._space(lines=True)
        if not self._take("}"):
            self._fail("expected ',' or '}'")
        if most is not None and most < least:
            self._fail(f"{least} repeats at least and {most} at most", start)
        return Repeat(item, least, most)

    def _integer(self) -> int:
        start = self._at
        digits = self._match(_INTEGER, "a number")
        if len(digits) > 9 or int(digits) > _MOST_REPEATS:
            self._fail(f"{digits[:12]} repeats (accepted: up to {_MOST_REPEATS})", start)
        return int(digits)

    def _literal(self) -> Node:
        items: list[Node] = []
        while not self._take('"'):
            code = self._char()
            items.append(Chars(merged([(code, code)])))
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _char_class(self, start: int) -> Node:
        negated = self._take("^")
        ranges = []
        while not self._take("]"):
            first = last = self._char()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._char()
            if last < first:
                self._fail("a range of characters that ends before it begins", start)
            ranges.append((first, last))
        if not ranges:
            self._fail("a class of no characters", start)
        return Chars(complement(merged(ranges)) if negated else merged(ranges))

    def _char(self) -> int:
        char = self._peek()
        if not char:
            self._fail("the grammar ends within a text")
        self._at += 1
        if char != "\\":
            return ord(char)
        kind, start = self._peek(), self._at - 1
        self._at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        digits = self._text[self._at : self._at + _HEX.get(kind, 0)]
        if kind not in _HEX or len(digits) < _HEX[kind] or not re.fullmatch(r"[0-9a-fA-F]+", digits):
            self._fail(
                f'escape {self._text[start : start + 2]!r} (accepted: t r n \\ " [ ] - xHH uHHHH UHHHHHHHH)', start
            )
        self._at += len(digits)
        code = int(digits, 16)
        if code > LAST or 0xD800 <= code <= 0xDFFF:
            self._fail(f"U+{code:X} is no character", start)
        return code

    # The text.

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _space(self, *, lines: bool) -> None:
        match = (_SPACE_OR_LINES if lines else _SPACE).match(self._text, self._at)
        assert match is not None, "it matches nothing, too"
        self._at = match.end()

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            self._fail(f"expected {what}")
        self._at = match.end()
        return match[0]

    def _fail(self, message: str, at: int | None = None) -> NoReturn:
        at = self._at if at is None else at
        line_start = self._text.rfind("\n", 0, at) + 1
        raise ConstraintError(message, line=self._text.count("\n", 0, at) + 1, column=at - line_start + 1)


def merged(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted ranges without surrogates; adjacent ranges are merged."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    cut = [piece for first, last in joined for piece in ((first, min(last, 0xD7FF)), (max(first, 0xE000), last))]
    return tuple((first, last) for first, last in cut if first <= last)


def complement(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """All other characters."""
    edges = [-1, *(edge for first, last in ranges for edge in (first, last)), LAST + 1]
    gaps = [(edges[i] + 1, edges[i + 1] - 1) for i in range(0, len(edges), 2)]
    return merged([(first, last) for first, last in gaps if first <= last])
