"""Logits processors: the caller's functions, which change each row of logits before the sampler chain reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.argument_checks import checked_functions
from slm_core.errors import InvalidOption
from slm_core.protocols import Vocab
from slm_core.sampling.candidates import Candidates
from slm_core.sampling.chain import SamplerChain, known_of
from slm_core.sampling.options import Sampling
from slm_core.sampling.steps import Known

LogitsProcessor: TypeAlias = Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]]
"""Called with all tokens before the next one, prompt included, and a copy of their row of logits, float32 [V]; returns
the row to sample from, float [V]. -inf removes a token. The convention follows transformers, without a batch."""


class ProcessedChain(SamplerChain):
    """A sampler chain that reads the rows that logits processors return.

    Args:
        sampling, stream: as for ``SamplerChain``.
        known: the properties of the vocabulary.
        processors: called in order, after a constraint; a token that the constraint removed stays removed.
    """

    def __init__(
        self, sampling: Sampling, *, known: Known, processors: Sequence[LogitsProcessor], stream: int = 0
    ) -> None:
        super().__init__(sampling, stream=stream, known=known)
        self._processors = tuple(processors)
        self._tokens: list[int] = []

    def accept(self, token: int) -> None:
        """Accept a token."""
        super().accept(token)
        self._tokens.append(token)

    def set_history(self, tokens: Sequence[int] | NDArray[np.int32], *, n_said: int = 0) -> None:
        """Replace the history of penalties and processors."""
        super().set_history(tokens, n_said=n_said)
        self._tokens = [int(token) for token in tokens]

    def clone(self) -> ProcessedChain:
        """An independent copy that continues the same stream, with the same processors."""
        twin = ProcessedChain(self.sampling, known=self._known, processors=self._processors)
        twin.set_state(self.state())
        twin._tokens, twin._last = list(self._tokens), self._last
        return twin

    def _likeliest(self, logits: NDArray[np.float32]) -> int:
        return super()._likeliest(self._processed(logits))

    def _candidates(self, logits: NDArray[np.float32]) -> Candidates:
        return super()._candidates(self._processed(logits))

    def _processed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        removed, row = np.isneginf(logits), logits.copy()
        for processor in self._processors:
            row = np.asarray(processor(tuple(self._tokens), row))
            if row.shape != logits.shape or row.dtype.kind != "f" or np.isnan(row).any():
                raise InvalidOption(
                    f"a logits processor returned {row.dtype} {list(row.shape)} (accepted: a row of float"
                    f" {list(logits.shape)}, none of them NaN)"
                )
        return np.where(removed, np.float32(-np.inf), row.astype(np.float32, copy=False))


def chain_for(
    sampling: Sampling, vocab: Vocab, processors: Sequence[LogitsProcessor] = (), *, stream: int = 0
) -> SamplerChain:
    """The chain of the options, with logits processors if there are any; see ``SamplerChain.for_vocab``.

    Raises:
        InvalidOption: the processors are not a list of functions.
    """
    functions = () if processors is None else checked_functions("logits_processors", processors)
    if not functions:
        return SamplerChain.for_vocab(sampling, vocab, stream=stream)
    return ProcessedChain(sampling, known=known_of(sampling, vocab), processors=functions, stream=stream)
