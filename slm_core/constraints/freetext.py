"""States of free text: the mask depends on a small state, so that it is computed once per state.

A mask of free text is the slowest to compute, because almost every token is allowed and has to be tested. But before
the marker is complete, the mask depends only on the length of the marker's prefix at the end of the text (Knuth, Morris
and Pratt 1977), on the missing bytes of a character, and on whether the text is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class FreeText:
    """A state in free text; states are equal if the same tokens may follow.

    Attributes:
        marker: the bytes that end it.
        token: the control token that ends it, or None.
        end: its last bytes, if they begin the marker or an incomplete character.
        empty: whether there is no text after the beginning, or after the last control token.
    """

    marker: bytes
    token: int | None
    end: bytes = b""
    empty: bool = True

    def after(self, token: int, data: bytes) -> Self | None:
        """The state after a token; None if the free text ends or may have ended.

        Args:
            token: the token, which was allowed.
            data: its bytes; empty for a control token.
        """
        if token == self.token:
            return None
        if not data:
            return type(self)(self.marker, self.token)
        text = self.end + data
        if self.marker in text:
            return None
        keep = max(_spelled(text, self.marker), _unfinished(text))
        return type(self)(self.marker, self.token, text[len(text) - keep :], empty=False)


def _spelled(text: bytes, marker: bytes) -> int:
    """The number of bytes at the end that begin the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def _unfinished(text: bytes) -> int:
    """The number of bytes of an incomplete character at the end."""
    for n in range(1, min(3, len(text)) + 1):
        byte = text[-n]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return n if n < length else 0
        if byte < 0x80:
            return 0
    return 0
