"""A suffix index: finds the longest suffix of the history that occurred before, and the tokens after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from slm_core.argument_checks import checked_list, checked_tokens
from slm_core.errors import InvalidOption
from slm_core.generation.speculation.lookup import continued
from slm_core.generation.speculation.proposal import NOTHING, Proposal, never
from slm_core.numerics import as_integer, common_prefix, shown

_CHECKED = 64
"""Tokens at the end of the previous history that are compared, to detect a changed history."""
_ROOT = 0


class SuffixAutomaton:
    """A suffix automaton: all substrings of a text in linear space, built token by token (Blumer et al. 1985).

    Attributes:
        text: the tokens.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]  # the offset after an occurrence of the state's substrings
        self._last = _ROOT

    def append(self, token: int) -> None:
        """Append a token to the text."""
        self.text.append(token)
        state = self._add({}, self._length[self._last] + 1, len(self.text))
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = state
            at = self._link[at]
        self._link[state] = _ROOT if at < 0 else self._split(at, token)
        self._last = state

    def seen_before(self) -> tuple[int, int]:
        """The length of the longest suffix of the text that occurs earlier, and the offset after that occurrence."""
        state = self._link[self._last]
        if state <= _ROOT:
            return 0, 0
        end, self._end[state] = self._end[state], len(self.text)
        return self._length[state], end

    def _split(self, at: int, token: int) -> int:
        """The state of the longest suffix that ends in ``token`` and occurs earlier; splits a state if needed."""
        following = self._next[at][token]
        if self._length[following] == self._length[at] + 1:
            return following
        clone = self._add(dict(self._next[following]), self._length[at] + 1, self._end[following])
        self._link[clone], self._link[following] = self._link[following], clone
        while at >= 0 and self._next[at].get(token) == following:
            self._next[at][token] = clone
            at = self._link[at]
        return clone

    def _add(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1


class SuffixIndex:
    """Proposes the tokens after an earlier occurrence of the longest suffix of the history.

    It also searches histories that were changed or are over (like SuffixDecoding, arXiv 2411.04975).

    Args:
        min_match: the shortest suffix, in tokens.
        max_tokens: the largest number of tokens in the index, about 700 bytes each; at the limit, the older half is
            removed.
        corpus: initial texts; dumps do not contain them.

    Raises:
        InvalidOption: min_match below 1, or max_tokens below 256.
    """

    def __init__(self, min_match: int = 2, *, max_tokens: int = 2**16, corpus: Iterable[Sequence[int]] = ()) -> None:
        shortest, most = as_integer(min_match), as_integer(max_tokens)
        if shortest is None or most is None or shortest < 1 or most < 256:
            raise InvalidOption(
                f"min_match={shown(min_match)}, max_tokens={shown(max_tokens)} (accepted: integers, min_match from 1,"
                " max_tokens from 256 on)"
            )
        texts = checked_list("corpus", corpus, "a list of texts, each as its tokens")
        self.min_match, self.max_tokens = shortest, most
        self._automaton = SuffixAutomaton()
        self._n_texts = 0
        self._history: list[int] = []
        self._match = (0, 0)
        for i, text in enumerate(texts):
            self._begin(checked_tokens(f"corpus[{i}]", text))
        self._history = []

    def __repr__(self) -> str:
        return f"SuffixIndex(min_match={self.min_match}, max_tokens={self.max_tokens})"

    def draft(self, tokens: Sequence[int], n: int, cancelled: Callable[[], bool] = never) -> Proposal:
        """The tokens after the longest suffix that occurred before."""
        self._follow(tokens)
        length, after = self._match
        if length < self.min_match:
            return NOTHING
        proposed = continued(self._automaton.text, after, n)
        return Proposal(proposed[: next((i for i, token in enumerate(proposed) if token < 0), n)])

    def settings(self) -> Mapping[str, object]:
        """The arguments of the class; other histories are not included."""
        return {"drafter": "suffix_index", "min_match": self.min_match, "max_tokens": self.max_tokens}

    def _follow(self, tokens: Sequence[int]) -> None:
        n_indexed = len(self._history)
        first = max(0, n_indexed - _CHECKED)
        if n_indexed and list(tokens[first:n_indexed]) == self._history[first:]:
            self._extend(tokens[n_indexed:])
        else:
            self._begin(tokens)

    def _begin(self, tokens: Sequence[int]) -> None:
        """Start another history. Only the end of the prefix that it shares with the previous one is indexed again."""
        common = common_prefix(tokens, self._history)
        self._n_texts += 1
        self._automaton.append(-self._n_texts)  # a unique separator: no match crosses it
        self._history = list(tokens[: max(0, common - _CHECKED)])
        self._extend(tokens[len(self._history) :])

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._automaton.append(token)
            self._match = self._automaton.seen_before()
        self._history.extend(tokens)
        if len(self._automaton.text) > self.max_tokens:
            recent, self._automaton = self._automaton.text[-self.max_tokens // 2 :], SuffixAutomaton()
            for token in recent:
                self._automaton.append(token)
                self._match = self._automaton.seen_before()
