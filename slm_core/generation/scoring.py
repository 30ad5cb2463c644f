"""Scoring: the log-probabilities of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slm_core.context_queue import queue_of
from slm_core.display import count, signature
from slm_core.errors import InvalidOption
from slm_core.generation.logprobs import Likeliest, likeliest
from slm_core.numerics import log_sum_exp
from slm_core.protocols import Context
from slm_core.types import Pos

_MAX_LOGITS = 2**23
"""The largest number of logits of one batch: 32 MB."""
_MOST_TOP = 1000
_FIRST_BATCH = 32
"""Tokens of the first batch, before the width of a row is known."""


@dataclass(frozen=True, slots=True, repr=False)
class Score:
    """The log-probabilities of tokens, each after all earlier tokens.

    Attributes:
        tokens: the tokens.
        logprobs: natural logarithm of the probability of each token; nan for the first token of a sequence.
        top: the likeliest tokens at each position, likeliest first: (token, logprob); () at the first position of a
            sequence. () as a whole with ``top=0``.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[Likeliest, ...] = ()

    def __repr__(self) -> str:
        scored = f"{count(self.n_scored, 'scored token')}"
        return signature(self, scored, f"total {self.total:.4g}", f"perplexity {self.perplexity:.4g}")

    @property
    def n_scored(self) -> int:
        """The number of tokens with a log-probability."""
        return sum(not math.isnan(logprob) for logprob in self.logprobs)

    @property
    def total(self) -> float:
        """The sum of the log-probabilities; 0.0 without any."""
        return math.fsum(logprob for logprob in self.logprobs if not math.isnan(logprob))

    @property
    def perplexity(self) -> float:
        """``exp(-total / n_scored)``, inf if that is larger than any float; nan without scored tokens."""
        try:
            return math.exp(-self.total / self.n_scored) if self.n_scored else math.nan
        except OverflowError:
            return math.inf


def score_tokens(
    context: Context, seq_id: int, tokens: Sequence[int], before: NDArray[np.float32] | None, *, top: int = 0
) -> Score:
    """Decode tokens at the end of a sequence, in batches.

    Args:
        context: the KV cache.
        seq_id: the sequence.
        tokens: the tokens to score; the last token is decoded, too.
        before: the logits after the sequence, float32 [V]; None if it is empty.
        top: the number of likeliest tokens to return at each position.

    Raises:
        ContextFull, InvalidToken: as in ``Context.decode``; earlier batches stay decoded.
    """
    batch, queue = context.new_batch(), queue_of(context)
    collector = _ScoreCollector(top)
    row = None if before is None else before[None, :].copy()
    start = 0
    while start < len(tokens):
        size = _FIRST_BATCH if row is None else max(1, _MAX_LOGITS // row.shape[1])
        chunk = tokens[start : start + min(size, batch.capacity)]
        batch.clear()
        batch.extend(chunk, Pos(seq_id, context.length(seq_id)), logits="all")
        with queue:
            rows = context.decode(batch).copy()
        if row is None:
            collector.skip()
        else:
            collector.add(row, chunk[:1])
        collector.add(rows[:-1], chunk[1:])
        row, start = rows[-1:], start + len(chunk)
    return collector.score(tokens)


def score_windows(context: Context, tokens: Sequence[int], *, top: int = 0) -> Score:
    """Score any number of tokens in an empty context, in windows that overlap by half.

    Each token has at least ``n_ctx // 2`` tokens before it, or all earlier tokens.
    """
    n_ctx, half = context.n_ctx, context.n_ctx // 2
    first = score_tokens(context, 0, tokens[:n_ctx], None, top=top)
    logprobs, alternatives = list(first.logprobs), list(first.top)
    for start in range(n_ctx, len(tokens), n_ctx - half):
        context.drop(0)
        window = score_tokens(context, 0, tokens[start - half : start - half + n_ctx], None, top=top)
        logprobs += window.logprobs[half:]
        alternatives += window.top[half:]
    return Score(tuple(tokens), tuple(logprobs), tuple(alternatives))


def checked_top(top: int) -> int:
    """The number of likeliest tokens, if it is from 0 to 1000.

    Raises:
        InvalidOption: ``top`` is invalid.
    """
    if not isinstance(top, int) or isinstance(top, bool) or not 0 <= top <= _MOST_TOP:
        raise InvalidOption(f"top={top!r} (accepted: an integer from 0 to {_MOST_TOP})")
    return top


class _ScoreCollector:
    """Collects the log-probabilities of a score."""

    def __init__(self, top: int) -> None:
        self._n = top
        self._logprobs: list[float] = []
        self._top: list[Likeliest] = []

    def skip(self) -> None:
        """Add a first token, which has no log-probability."""
        self._logprobs.append(math.nan)
        self._top += [()] if self._n else []

    def add(self, rows: NDArray[np.float32], tokens: Sequence[int]) -> None:
        """Add tokens, each with the row of logits before it, float32 [n, V]."""
        for row, token in zip(rows, tokens, strict=True):
            total = log_sum_exp(row, dtype=np.float64)
            self._logprobs.append(float(row[token]) - total)
            if self._n:
                self._top.append(likeliest(np.arange(len(row)), row.astype(np.float64) - total, self._n))

    def score(self, tokens: Sequence[int]) -> Score:
        """The score of all tokens."""
        return Score(tuple(tokens), tuple(self._logprobs), tuple(self._top))
