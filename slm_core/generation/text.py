"""Text of token bytes, without incomplete characters and stop texts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop text in a stream, and holds back text that may become a stop text.

    Args:
        stops: the stop texts, not empty.
        held: held-back text of a resumed stream.

    Attributes:
        found: the stop text that was found; None before.
    """

    def __init__(self, stops: Sequence[str], held: str = "") -> None:
        self._stops = tuple(stops)
        self.held = held
        self.found: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """Add text; returns the text that cannot belong to a stop text, and whether a stop text was found."""
        if not self._stops:
            return text, False
        text = self.held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self.found = min(matches)  # the first that is complete, wherever the text was split
            self.held = ""
            return text[:start], True
        n_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self.held = text[len(text) - n_held :]
        return text[: len(text) - n_held], False

    def flush(self) -> str:
        """Return the held-back text at the end of the stream."""
        held, self.held = self.held, ""
        return held


class TextStream:
    """Joins token bytes to text; bytes that cannot become UTF-8 turn into U+FFFD.

    Args:
        stops: texts that end the stream.
        pending: bytes of an incomplete character of a resumed stream.
        held: held-back text of a resumed stream.
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

    @property
    def stop(self) -> str | None:
        """The stop text that was found; None before."""
        return self._matcher.found

    def feed(self, data: bytes) -> tuple[str, bool]:
        """Add the bytes of a token; returns new text, and whether a stop text was found."""
        return self._matcher.feed(self._decoder.decode(data))

    def flush(self) -> tuple[str, bool]:
        """End the stream; returns the remaining text, and whether it completed a stop text."""
        text, stopped = self._matcher.feed(self._decoder.decode(b"", final=True))
        return (text, True) if stopped else (text + self._matcher.flush(), False)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
