"""Choosing a token from the top-k logits, for contexts that compute the top-k on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.protocols import Sampler
from slm_core.sampling import SamplerChain
from slm_core.types import PrefillProgress


class TopRow(NamedTuple):
    """The k largest logits after a history.

    Attributes:
        tokens: int32 [k], by descending logits; ties: lower id first.
        logits: float32 [k], the logits of the tokens.
        log_total: logarithm of the sum of the exponentials of all logits.
    """

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]
    log_total: float


Row: TypeAlias = NDArray[np.float32] | TopRow
"""The logits after a history: all V logits, or the k largest."""


class TopSource(Protocol):
    """A history whose context can compute top-k logits on the device."""

    def next_top(self, k: int, cancelled: Callable[[], bool], *, progress: PrefillProgress | None = None) -> Row | None:
        """Decode pending tokens; returns the k largest logits after them, or the full row if it is known already.

        Args:
            k: the number of logits.
            cancelled: called before each batch; if it returns True, the result is None.
            progress: called after each batch.
        """
        ...


@dataclass(frozen=True, slots=True)
class TopChoice:
    """Chooses tokens of a generation from the largest logits.

    Attributes:
        source: the history of the generation.
        chain: its sampler.
        k: the number of logits that the sampler needs.
        n_vocab: the size of the vocabulary.
    """

    source: TopSource
    chain: SamplerChain
    k: int
    n_vocab: int

    def next_row(self, cancelled: Callable[[], bool], progress: PrefillProgress | None) -> Row | None:
        """The logits after the history; see ``TopSource``."""
        return self.source.next_top(self.k, cancelled, progress=progress)

    def choose(self, row: TopRow) -> tuple[int, float]:
        """A token, and the natural logarithm of its probability before sampling."""
        token = self.chain.sample_top(row.tokens, row.logits, self.n_vocab)
        return token, float(row.logits[(row.tokens == token).argmax()]) - row.log_total


def top_choice(source: TopSource, sampler: Sampler, n_vocab: int) -> TopChoice | None:
    """A ``TopChoice``; None if the sampler needs the full row, or has to return log-probabilities of it."""
    if type(sampler) is not SamplerChain or sampler.n_top is None or sampler.sampling.logprobs is not None:
        return None
    return TopChoice(source, sampler, min(sampler.n_top, n_vocab), n_vocab)
