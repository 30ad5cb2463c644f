"""Drafts by another, smaller model."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from slm_core.closing import Closing
from slm_core.errors import InvalidOption
from slm_core.generation.speculation.proposal import NOTHING, DraftProbabilities, Proposal, never
from slm_core.numerics import common_prefix
from slm_core.protocols import Context, Vocab
from slm_core.sampling import SamplerChain, Sampling
from slm_core.sampling.stream import split_mix
from slm_core.types import EditLevel, Pos

_DRAFTS = 2**63
"""Sets the random numbers of drafts apart from those that answers are drawn with."""


class DraftModel(Closing):
    """Drafts with a model that has the vocabulary of the one that answers.

    Greedy drafts need no random numbers, and what is said is what would be said without them. Drawn drafts are
    accepted more often at high temperatures (see ``accept_or_draw``).

    Args:
        context: of the smaller model; its sequence 0 is used, and it is closed with the drafter.
        vocab: the smaller model's vocabulary, as ``same_tokens`` finds it.
        n_vocab: tokens of the model that answers, where it has fewer: the others are never drafted.
        sampling: to draw drafts with, best as answers are drawn; None for the likeliest tokens. A draw depends on the
            seed and the position alone.

    Raises:
        InvalidOption: the context cannot truncate, so a wrong guess would cost a replay.
    """

    def __init__(
        self, context: Context, vocab: Vocab, *, n_vocab: int | None = None, sampling: Sampling | None = None
    ) -> None:
        if context.edit_level < EditLevel.TRUNCATE:
            raise InvalidOption(
                f"the draft model's context has edit level {context.edit_level.name} (accepted: TRUNCATE, CUT)"
            )
        self._context = context
        self._vocab = vocab
        self._n_vocab = n_vocab
        self._chain = None if sampling is None else SamplerChain.for_vocab(sampling, vocab)
        self._seed = secrets.randbits(63) if sampling is None or sampling.seed is None else sampling.seed
        self._held: list[int] = []

    def draft(self, tokens: Sequence[int], n: int, cancelled: Callable[[], bool] = never) -> Proposal:
        """What the model says next; nothing where its context is too small."""
        n_common = common_prefix(self._held, tokens[:-1])
        if len(tokens) + n - 1 > self._context.n_ctx or max(tokens[n_common:]) >= self._vocab.size:
            return NOTHING
        if self._chain is not None:
            self._chain.set_history(tokens)
        self._context.truncate(Pos(0, n_common))
        del self._held[n_common:]
        row = self._feed(tokens[n_common:], cancelled)
        drafted: list[int] = []
        draft_probabilities: list[DraftProbabilities] = []
        for i in range(n):
            if row is None:
                return NOTHING
            token, drawn_from = self._choose(row, len(tokens) + i)
            drafted.append(token)
            draft_probabilities += [] if drawn_from is None else [drawn_from]
            if token in self._vocab.eog_ids or i == n - 1:
                break
            row = self._feed([token], cancelled)
        return Proposal(drafted, draft_probabilities)

    def settings(self) -> None:
        """A model is in no dump."""
        return

    def close(self) -> None:
        """Close the context. Twice is fine."""
        self._context.close()

    def _feed(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> NDArray[np.float32] | None:
        """Decode tokens; the row after the last, float32 [V], valid until the next call; None where cancelled."""
        batch, rows = self._context.new_batch(), None
        for first in range(0, len(tokens), batch.capacity):
            if cancelled():
                return None
            chunk = tokens[first : first + batch.capacity]
            batch.clear()
            batch.extend(chunk, Pos(0, len(self._held)), logits="last")
            rows = self._context.decode(batch)
            self._held.extend(chunk)
        return None if rows is None else rows[0]

    def _choose(self, row: NDArray[np.float32], position: int) -> tuple[int, DraftProbabilities | None]:
        row = row[: self._n_vocab]
        if self._chain is None:
            return int(row.argmax()), None
        ids, probabilities = self._chain.distribution(row)
        uniform = (split_mix(split_mix(self._seed) ^ _DRAFTS ^ position) >> 11) / 2**53
        token = draw(ids, probabilities, uniform)
        self._chain.accept(token)
        return token, (ids, probabilities)


def draw(ids: NDArray[np.int64], weights: NDArray[np.float64], uniform: float) -> int:
    """The token at a share ``uniform``, in [0, 1), of the sum of the weights."""
    edges = np.cumsum(weights)
    return int(ids[np.searchsorted(edges, uniform * edges[-1], side="right").clip(max=len(ids) - 1)])


def same_tokens(vocab: Vocab, other: Vocab) -> bool:
    """Whether all tokens that both vocabularies number are the same, by their bytes; looks at each once."""
    if vocab is other:
        return True
    return all(
        vocab.token_bytes(token, special=True) == other.token_bytes(token, special=True)
        for token in range(min(vocab.size, other.size))
    )
