"""Where free text stands: what may follow depends on little, so that masks over it are worked out once.

A mask that leaves all but a few tokens free is the dearest there is: every token is looked at. But before its marker is
complete, free text is told apart by nothing more than how much of the marker its end spells (Knuth, Morris and Pratt
1977), which bytes of a character are missing, and whether there is any.
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
        empty: whether there is no text since the beginning or the last control token.
    """

    marker: bytes
    token: int | None
    end: bytes = b""
    empty: bool = True

    def after(self, token: int, data: bytes) -> Self | None:
        """The state after a token; None if the free text ends or may have ended.

        Args:
            token: which was allowed.
            data: its bytes; none for a control token.
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
    """How many bytes at the end begin the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def _unfinished(text: bytes) -> int:
    """How many bytes at the end are a character that is not complete."""
    for n in range(1, min(3, len(text)) + 1):
        byte = text[-n]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return n if n < length else 0
        if byte < 0x80:
            return 0
    return 0
