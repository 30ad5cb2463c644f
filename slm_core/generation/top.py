"""Choosing from the largest logits alone, where a context picks them without handing out rows."""

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
    """The k largest logits that follow a history.

    Attributes:
        tokens: int32 [k], those of the largest logits first; of equal ones, the lower id.
        logits: float32 [k], theirs.
        log_total: logarithm of the sum of the exponentials of all logits.
    """

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]
    log_total: float


Row: TypeAlias = NDArray[np.float32] | TopRow
"""What follows a history: all V logits, or the largest."""


class TopSource(Protocol):
    """A history whose next logits can be picked where they are computed."""

    def next_top(self, k: int, cancelled: Callable[[], bool], *, progress: PrefillProgress | None = None) -> Row | None:
        """Decode what is pending, then the k largest logits that follow; all of them where they are known already.

        Args:
            k: how many.
            cancelled: asked before each batch; None is returned where it came true.
            progress: called after each batch.
        """
        ...


@dataclass(frozen=True, slots=True)
class TopChoice:
    """How a generation chooses from the largest logits.

    Attributes:
        source: the history that it extends.
        chain: its sampler.
        k: how many logits that looks at.
        n_vocab: how many there are.
    """

    source: TopSource
    chain: SamplerChain
    k: int
    n_vocab: int

    def next_row(self, cancelled: Callable[[], bool], progress: PrefillProgress | None) -> Row | None:
        """What follows the history; see ``TopSource``."""
        return self.source.next_top(self.k, cancelled, progress=progress)

    def choose(self, row: TopRow) -> tuple[int, float]:
        """A token, and the natural logarithm of its probability before sampling."""
        token = self.chain.sample_top(row.tokens, row.logits, self.n_vocab)
        return token, float(row.logits[(row.tokens == token).argmax()]) - row.log_total


def top_choice(source: TopSource, sampler: Sampler, n_vocab: int) -> TopChoice | None:
    """How to choose from the largest logits; None where the sampler may look at others, or shall tell of them."""
    if type(sampler) is not SamplerChain or sampler.n_top is None or sampler.sampling.logprobs is not None:
        return None
    return TopChoice(source, sampler, min(sampler.n_top, n_vocab), n_vocab)
