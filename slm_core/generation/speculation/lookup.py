"""Prompt lookup: what followed the last time the same few tokens were said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from slm_core.errors import InvalidOption
from slm_core.generation.speculation.proposal import NOTHING, Proposal, never

_CHECKED = 64
"""Tokens at its end by which a history is known to continue the one before."""


class PromptLookup:
    """Looks for the last tokens earlier in the history, and proposes what followed there (Saxena 2023).

    Args:
        max_ngram: tokens to look for; the longest run that is found counts.
        min_ngram: the shortest run that counts.

    Raises:
        InvalidOption: not ``1 <= min_ngram <= max_ngram <= 16``.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram <= 16:
            raise InvalidOption(f"max_ngram={max_ngram}, min_ngram={min_ngram} (accepted: 1 <= min <= max <= 16)")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self._seen: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # of each run, the place after its last occurrence but the newest

    def draft(self, tokens: Sequence[int], n: int, cancelled: Callable[[], bool] = never) -> Proposal:
        """What followed the longest run that was there before."""
        self._follow(tokens)
        for size in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            after = self._ends.get(tuple(tokens[-size:]))
            if after is not None:
                return Proposal(continued(self._seen, after, n))
        return NOTHING

    def settings(self) -> Mapping[str, object]:
        """How it was made; the rest is in the history."""
        return {"drafter": "prompt_lookup", "max_ngram": self.max_ngram, "min_ngram": self.min_ngram}

    def _follow(self, tokens: Sequence[int]) -> None:
        """Index the runs that end before the last token. A history that changed far back is only a worse guess."""
        seen = self._seen
        first = max(0, len(seen) - _CHECKED)
        if list(tokens[first : len(seen)]) != seen[first:]:
            seen.clear()
            self._ends.clear()
        for token in tokens[len(seen) :]:
            for size in range(self.min_ngram, self.max_ngram + 1):
                if size <= len(seen):
                    self._ends[tuple(seen[-size:])] = len(seen)
            seen.append(token)


def continued(tokens: Sequence[int], start: int, n: int) -> list[int]:
    """``n`` tokens from ``start`` on; at the end of ``tokens``, what was copied so far goes on being copied."""
    copied = list(tokens[start : start + n])
    while 0 < len(copied) < n:
        copied.append(copied[len(copied) - (len(tokens) - start)])
    return copied
