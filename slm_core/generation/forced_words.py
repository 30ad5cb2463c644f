"""Words that every hypothesis of a beam search must contain, and the progress of a hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

from slm_core.errors import InvalidOption
from slm_core.protocols import Vocab


class ForcedWords:
    """The words as tokens. Each word may be spelled with or without a space before it.

    A hypothesis contains a word if its tokens contain one of the spellings. Its progress counts tokens, so that a beam
    search can keep hypotheses of every progress (dynamic beam allocation: Post and Vilar, arXiv 1804.06609).

    Args:
        words: texts, not empty.
        vocab: encodes the words.
        max_tokens: the longest hypothesis.

    Raises:
        InvalidOption: a word has no tokens, or all words together do not fit into ``max_tokens``.
    """

    def __init__(self, words: Sequence[str], vocab: Vocab, max_tokens: int) -> None:
        self._words = [_spellings(word, vocab) for word in words]
        needed = self.needed((), frozenset())
        if needed > max_tokens:
            raise InvalidOption(
                f"force_words={tuple(words)!r} take {needed} tokens (accepted: up to max_tokens, {max_tokens})"
            )

    def contained(self, tokens: Sequence[int], before: frozenset[int]) -> frozenset[int]:
        """Indices of the words that ``tokens`` contain; ``before`` is the result without the last token."""
        return before.union(
            i
            for i, spellings in enumerate(self._words)
            if i not in before and any(_ends(tokens, spelling) == len(spelling) for spelling in spellings)
        )

    def needed(self, tokens: Sequence[int], contained: frozenset[int]) -> int:
        """The number of tokens to complete all missing words, including a partial word at the end."""
        missing_words = [spellings for i, spellings in enumerate(self._words) if i not in contained]
        n_written = (
            min(map(len, spellings)) - min(len(spelling) - _ends(tokens, spelling) for spelling in spellings)
            for spellings in missing_words
        )
        return sum(min(map(len, spellings)) for spellings in missing_words) - max(n_written, default=0)

    def next_tokens(self, tokens: Sequence[int], contained: frozenset[int]) -> set[int]:
        """Tokens that begin or continue a missing word."""
        missing_spellings = (spelling for i, word in enumerate(self._words) if i not in contained for spelling in word)
        return {spelling[_ends(tokens, spelling)] for spelling in missing_spellings}

    def complete(self, contained: frozenset[int]) -> bool:
        """Whether no word is missing."""
        return len(contained) == len(self._words)


def _spellings(word: str, vocab: Vocab) -> list[tuple[int, ...]]:
    spellings = {tuple(vocab.encode(text, add_special=False, parse_special=False)) for text in (word, f" {word}")}
    if not all(spellings):
        raise InvalidOption(f"force_words: {word!r} has no tokens in this vocabulary")
    return sorted(spellings)


def _ends(tokens: Sequence[int], spelling: tuple[int, ...]) -> int:
    """The length of the longest prefix of ``spelling`` at the end of ``tokens``."""
    for n in range(min(len(tokens), len(spelling)), 0, -1):
        if tuple(tokens[len(tokens) - n :]) == spelling[:n]:
            return n
    return 0
