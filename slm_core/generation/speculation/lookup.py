"""Prompt lookup: draft the tokens that followed the last occurrence of the same n-gram."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from slm_core.argument_checks import checked_tokens
from slm_core.errors import InvalidOption
from slm_core.generation.speculation.proposal import NOTHING, Proposal, never
from slm_core.numerics import as_integer, shown

_CHECKED = 64
"""Tokens at the end of the previous history that are compared, to detect a changed history."""


class PromptLookup:
    """Looks up the last n-gram earlier in the history, and proposes the tokens after it (Saxena 2023).

    Args:
        max_ngram: the longest n-gram, in tokens; the longest match is used.
        min_ngram: the shortest n-gram.
        expected: tokens that are likely in the answer, such as the text that it edits: they are looked up, too.

    Raises:
        InvalidOption: not integers with ``1 <= min_ngram <= max_ngram <= 16``, or ``expected`` is not a list of tokens.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2, expected: Sequence[int] = ()) -> None:
        most, least = as_integer(max_ngram), as_integer(min_ngram)
        if most is None or least is None or not 1 <= least <= most <= 16:
            raise InvalidOption(
                f"max_ngram={shown(max_ngram)}, min_ngram={shown(min_ngram)} (accepted: 1 <= min <= max <= 16)"
            )
        self.max_ngram, self.min_ngram = most, least
        self.expected = tuple(checked_tokens("expected", expected))
        self._indexed: list[int] = []  # ``expected``, then the history
        self._ends: dict[tuple[int, ...], int] = {}  # by n-gram: the offset after its last occurrence but the newest
        self._index(self.expected)

    def __repr__(self) -> str:
        return f"PromptLookup(max_ngram={self.max_ngram}, min_ngram={self.min_ngram})"

    def draft(self, tokens: Sequence[int], n: int, cancelled: Callable[[], bool] = never) -> Proposal:
        """The tokens after the longest n-gram that occurred before."""
        self._follow(tokens)
        for size in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            after = self._ends.get(tuple(tokens[-size:]))
            if after is not None:
                return Proposal(continued(self._indexed, after, n))
        return NOTHING

    def settings(self) -> Mapping[str, object] | None:
        """The arguments of the class; the index can be rebuilt from the history. None with expected tokens."""
        return (
            None
            if self.expected
            else {"drafter": "prompt_lookup", "max_ngram": self.max_ngram, "min_ngram": self.min_ngram}
        )

    def _follow(self, tokens: Sequence[int]) -> None:
        """Index the n-grams before the last token. An undetected change of the history only makes drafts worse."""
        indexed, n_before = self._indexed, len(self.expected)
        first = max(n_before, len(indexed) - _CHECKED)
        if list(tokens[first - n_before : len(indexed) - n_before]) != indexed[first:]:
            indexed.clear()
            self._ends.clear()
            self._index(self.expected)
        self._index(tokens[len(indexed) - n_before :])

    def _index(self, tokens: Sequence[int]) -> None:
        indexed = self._indexed
        for token in tokens:
            for size in range(self.min_ngram, self.max_ngram + 1):
                if size <= len(indexed):
                    self._ends[tuple(indexed[-size:])] = len(indexed)
            indexed.append(token)


def continued(tokens: Sequence[int], start: int, n: int) -> list[int]:
    """``n`` tokens from ``start`` on; past the end of ``tokens``, the copied tokens repeat."""
    copied = list(tokens[start : start + n])
    while 0 < len(copied) < n:
        copied.append(copied[len(copied) - (len(tokens) - start)])
    return copied
