"""Reads text that arrives in pieces, with generators: a step yields when it needs more text.

Each step passes text on as soon as it is certain, so little text is held back, and the time is linear. The result does
not depend on the boundaries of the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias, TypeVar

_T = TypeVar("_T")
Steps: TypeAlias = Generator[None, None, _T]
"""A generator that yields when it needs more text, and returns a result."""
Sink: TypeAlias = Callable[[str], None]

_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text is malformed; the message gives the reason in one line. Never leaves this package."""


class Markers:
    """Literal texts to search for; the longest match at an offset counts.

    Args:
        texts: the markers; empty texts are ignored.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        markers = sorted({text for text in texts if text}, key=len, reverse=True)
        self.texts = tuple(markers)
        self._pattern = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        self._starts = re.compile("|".join(sorted({re.escape(text[0]) for text in markers})) or r"(?!)")
        self._prefixes = frozenset(text[:n] for text in markers for n in range(1, len(text)))
        self._longest = max(map(len, markers), default=1)

    def find(self, text: str, at: int, *, final: bool) -> re.Match[str] | None:
        """The first marker from ``at`` on; None if there is none, or if a longer one may still arrive."""
        match = self._pattern.search(text, at)
        if match is not None and not final and text[match.start() :] in self._prefixes:
            return None
        return match

    def hold(self, text: str, at: int) -> int:
        """The start of a possible partial marker at the end of ``text``; the length of ``text`` if there is none."""
        at = max(at, len(text) - self._longest + 1)
        while match := self._starts.search(text, at):
            if text[match.start() :] in self._prefixes:
                return match.start()
            at = match.end()
        return len(text)


class Reader:
    """The text that has arrived and is not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.final = False
        self._raw: list[str] = []

    def add(self, text: str) -> None:
        """Add text."""
        self.text, self.at = self.text[self.at :] + text, 0

    # The text since the last restart is stored, to report it unchanged.

    def restart(self) -> None:
        """Forget the text that was read."""
        self._raw = []

    @property
    def raw(self) -> str:
        """The text that was read since the last restart."""
        return "".join(self._raw)

    # Steps.

    def take(self, end: int) -> str:
        """Read up to ``end``, which has arrived."""
        text, self.at = self.text[self.at : end], end
        self._raw.append(text)
        return text

    def peek(self, length: int = 1) -> Steps[str]:
        """The next characters, fewer only at the end of the text; nothing is read."""
        while len(self.text) - self.at < length and not self.final:
            yield
        return self.text[self.at : self.at + length]

    def space(self) -> Steps[str]:
        """Read white space."""
        parts = []
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            if match.end() > self.at:
                parts.append(self.take(match.end()))
            if self.at < len(self.text) or self.final:
                return "".join(parts)
            yield

    def next(self) -> Steps[str]:
        """Read white space and return the character after it, which is not read; "" at the end of the text."""
        yield from self.space()
        return self.text[self.at : self.at + 1]

    def begins(self, literal: str) -> Steps[bool]:
        """Whether the text continues with ``literal``; nothing is read."""
        while True:
            arrived = self.text[self.at : self.at + len(literal)]
            if arrived == literal:
                return True
            if self.final or not literal.startswith(arrived):
                return False
            yield

    def accept(self, literal: str) -> Steps[bool]:
        """Read ``literal`` if the text continues with it; returns whether it does."""
        accepted = yield from self.begins(literal)
        if accepted:
            self.take(self.at + len(literal))
        return accepted

    def expect(self, literal: str) -> Steps[None]:
        """Read ``literal``; white space in it and before it may vary.

        Raises:
            Malformed: the text continues differently, or ends.
        """
        for word in literal.split():
            yield from self.space()
            if not (yield from self.accept(word)):
                raise Malformed(f"expected {word!r}" + ("" if self.at < len(self.text) else ", but the answer ends"))

    def close(self, literal: str, *, whole: bool) -> Steps[None]:
        """Read ``literal`` like ``expect``, or a part of it at the end of the text.

        Args:
            literal: the closing text.
            whole: whether the text before is complete without it; otherwise its first word is required.

        Raises:
            Malformed: the text continues differently, or ends too early.
        """
        if not literal and not whole:
            raise Malformed("the call has no arguments")
        for word in literal.split():
            yield from self.space()
            if (yield from self.accept(word)):
                whole = True
            elif whole and self.final and word.startswith(self.text[self.at :]):
                self.take(len(self.text))
            else:
                raise Malformed(f"expected {word!r}" if self.at < len(self.text) else "the answer ends within the call")

    def match(self, pattern: re.Pattern[str], limit: int = 1 << 62) -> Steps[str]:
        """Read the longest run of characters that match ``pattern``, a repeated character class."""
        parts: list[str] = []
        while True:
            match = pattern.match(self.text, self.at)
            if match is not None and match.end() > self.at:
                parts.append(self.take(match.end()))
                limit -= len(parts[-1])
            if limit < 0:
                raise Malformed("a name is too long")
            if self.at < len(self.text) or self.final:
                return "".join(parts)
            yield

    def until(self, markers: Markers, sink: Sink) -> Steps[str]:
        """Pass text to ``sink`` up to a marker, which is returned and not read; "" at the end of the text."""
        while True:
            match = markers.find(self.text, self.at, final=self.final)
            end = match.start() if match else len(self.text) if self.final else markers.hold(self.text, self.at)
            if end > self.at:
                sink(self.take(end))
            if match or self.final:
                return match.group() if match else ""
            yield
