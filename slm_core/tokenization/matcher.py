"""Finding the longest of many strings at each place of a text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class LongestMatcher:
    """Finds occurrences of given strings from left to right, at each place the longest one, never overlapping.

    Args:
        strings: what to find; empty ones are never found.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = frozenset(strings) - {""}
        lengths: dict[str, set[int]] = {}
        for string in self._strings:
            lengths.setdefault(string[0], set()).add(len(string))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._starts = re.compile(f"[{''.join(map(re.escape, sorted(lengths)))}]") if lengths else None

    def finditer(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of each occurrence."""
        if self._starts is None:
            return
        place = self._starts.search(text)
        while place:
            start = place.start()
            end = self._longest(text, start)
            if end > start:
                yield start, end
            place = self._starts.search(text, max(end, start + 1))

    def _longest(self, text: str, start: int) -> int:
        for length in self._lengths[text[start]]:
            if text[start : start + length] in self._strings:
                return start + length
        return start
