"""Texts whose tokens are coloured by their probabilities, for notebooks and terminals."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from slm_core.display import count, preview, signature
from slm_core.display.blocks import TokenProbability, coloured_tokens
from slm_core.display.html import card
from slm_core.generation.events import Event
from slm_core.generation.scoring import Score
from slm_core.protocols import Vocab


class ColouredText:
    """A text with the probability of each token. A notebook colours it; a pointer on a token shows the alternatives.

    Args:
        tokens: the tokens, with natural logarithms of their probabilities.
    """

    def __init__(self, tokens: Sequence[TokenProbability]) -> None:
        self.tokens = tuple(tokens)

    @classmethod
    def of_events(cls, events: Iterable[Event], vocab: Vocab) -> Self:
        """The text of an answer, from the events of its stream.

        Alternatives are the likeliest tokens of the model, if ``Sampling.logprobs`` is set.
        """
        chosen = [event for event in events if event.token is not None]
        texts = _texts([event.token for event in chosen if event.token is not None], vocab)
        tops = [() if event.logprobs is None else event.logprobs.model for event in chosen]
        logprobs = [event.logprob for event in chosen]
        return cls(_probabilities(texts, logprobs, tops, vocab))

    @classmethod
    def of_score(cls, score: Score, vocab: Vocab) -> Self:
        """The text of a score; alternatives are its ``top``."""
        texts = _texts(score.tokens, vocab)
        tops = score.top or [()] * len(score.tokens)
        return cls(_probabilities(texts, score.logprobs, tops, vocab))

    @property
    def text(self) -> str:
        """The text; control tokens are spelled out."""
        return "".join(token.text for token in self.tokens)

    def __repr__(self) -> str:
        return signature(self, count(len(self.tokens), "token"), preview(self.text))

    def _repr_html_(self) -> str:
        return card(count(len(self.tokens), "token"), coloured_tokens(self.tokens))


def _probabilities(
    texts: Iterable[str],
    logprobs: Iterable[float],
    tops: Iterable[Sequence[tuple[int, float]]],
    vocab: Vocab,
) -> list[TokenProbability]:
    return [
        TokenProbability(text, logprob, [(vocab.decode([token], special=True), each) for token, each in top])
        for text, logprob, top in zip(texts, logprobs, tops, strict=True)
    ]


def _texts(tokens: Sequence[int], vocab: Vocab) -> Iterator[str]:
    """The text of each token. The text of a character that several tokens share belongs to the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i, token in enumerate(tokens):
        yield decoder.decode(vocab.token_bytes(token, special=True), final=i == len(tokens) - 1)
