"""Drafts of a smaller model."""

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
"""The stream of random numbers for drafts, different from the streams of answers."""


class DraftModel(Closing):
    """Drafts with a model that has the same vocabulary as the target model.

    Greedy drafts need no random numbers, and do not change the answer. Sampled drafts are accepted more often at high
    temperatures (see ``accept_or_draw``).

    Args:
        context: a context of the smaller model; the drafter uses its sequence 0 and closes it.
        vocab: the smaller model's vocabulary; see ``same_tokens``.
        n_vocab: the vocabulary size of the target model, if it is smaller: larger ids are never drafted.
        sampling: options to sample drafts, best the same as of the answers; None for greedy drafts. A draw depends only
            on the seed and the position.

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
        self._decoded: list[int] = []

    def draft(self, tokens: Sequence[int], n: int, cancelled: Callable[[], bool] = never) -> Proposal:
        """The next tokens of the model; empty if its context is too small."""
        n_common = common_prefix(self._decoded, tokens[:-1])
        if len(tokens) + n - 1 > self._context.n_ctx or max(tokens[n_common:]) >= self._vocab.size:
            return NOTHING
        if self._chain is not None:
            self._chain.set_history(tokens)
        self._context.truncate(Pos(0, n_common))
        del self._decoded[n_common:]
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
        """None: dumps do not contain models."""
        return

    def close(self) -> None:
        """Close the context. A second call does nothing."""
        self._context.close()

    def _feed(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> NDArray[np.float32] | None:
        """Decode tokens; returns the row after the last, float32 [V], valid until the next call; None if cancelled."""
        batch, rows = self._context.new_batch(), None
        for first in range(0, len(tokens), batch.capacity):
            if cancelled():
                return None
            chunk = tokens[first : first + batch.capacity]
            batch.clear()
            batch.extend(chunk, Pos(0, len(self._decoded)), logits="last")
            rows = self._context.decode(batch)
            self._decoded.extend(chunk)
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
    """Draw a token by inverse transform sampling: ``uniform`` is in [0, 1)."""
    edges = np.cumsum(weights)
    return int(ids[np.searchsorted(edges, uniform * edges[-1], side="right").clip(max=len(ids) - 1)])


def same_tokens(vocab: Vocab, other: Vocab) -> bool:
    """Whether all ids that both vocabularies contain have the same bytes."""
    if vocab is other:
        return True
    return all(
        vocab.token_bytes(token, special=True) == other.token_bytes(token, special=True)
        for token in range(min(vocab.size, other.size))
    )
