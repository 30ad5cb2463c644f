"""Finds the longest of many strings at each offset of a text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class LongestMatcher:
    """Finds non-overlapping occurrences of strings from left to right, the longest string at each offset.

    Args:
        strings: the strings; empty strings are ignored.
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
        match = self._starts.search(text)
        while match:
            start = match.start()
            end = self._longest(text, start)
            if end > start:
                yield start, end
            match = self._starts.search(text, max(end, start + 1))

    def _longest(self, text: str, start: int) -> int:
        for length in self._lengths[text[start]]:
            if text[start : start + length] in self._strings:
                return start + length
        return start
