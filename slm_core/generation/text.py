"""From token bytes to text that may be shown: no half characters, no stop texts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop text in a stream, and holds back what may become one.

    Args:
        stops: the texts; none may be empty.
        held: text that was held back, where a stream is continued.
    """

    def __init__(self, stops: Sequence[str], held: str = "") -> None:
        self._stops = tuple(stops)
        self.held = held

    def feed(self, text: str) -> tuple[str, bool]:
        """Take text; returns what is certain not to be of a stop text, and whether one was found."""
        if not self._stops:
            return text, False
        text = self.held + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.held = ""
            return text[: min(found)], True
        n_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self.held = text[len(text) - n_held :]
        return text[: len(text) - n_held], False

    def flush(self) -> str:
        """What was held back: no more text follows, so it was not of a stop text."""
        held, self.held = self.held, ""
        return held


class TextStream:
    """Joins token bytes to text; bytes that cannot become UTF-8 turn into U+FFFD.

    Args:
        stops: texts that end the stream.
        pending: bytes of an incomplete character, where a stream is continued.
        held: text that was held back, likewise.
    """

    def __init__(self, stops: Sequence[str] = (), pending: bytes = b"", held: str = "") -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.setstate((pending, 0))
        self._matcher = StopMatcher(stops, held)

    @property
    def pending(self) -> bytes:
        """Bytes of an incomplete character."""
        return bytes(self._decoder.getstate()[0])

    @property
    def held(self) -> str:
        """Text that may become a stop text."""
        return self._matcher.held

    def feed(self, data: bytes) -> tuple[str, bool]:
        """Take the bytes of a token; returns new text, and whether a stop text was found."""
        return self._matcher.feed(self._decoder.decode(data))

    def flush(self) -> tuple[str, bool]:
        """No more bytes follow; returns the rest, and whether it completed a stop text."""
        text, stopped = self._matcher.feed(self._decoder.decode(b"", final=True))
        return (text, True) if stopped else (text + self._matcher.flush(), False)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with, short of all of it."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
