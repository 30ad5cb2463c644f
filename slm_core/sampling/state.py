"""The history of a sampler chain, and the state that its steps get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.sampling.candidates import Candidates, Ids, Values


@dataclass(frozen=True, slots=True)
class StepState:
    """The input of a step besides the candidates.

    Attributes:
        history: the last tokens, oldest first, int32 [n]; n is the widest window of the chain's steps.
        n_said: tokens of the answer so far.
        n_vocab: vocabulary size V.
        memory: numbers that steps learned from earlier tokens, by name.
        uniform: the next random number in [0, 1) for the steps of this draw; the same if the draw is repeated.
        learned: values to store in ``memory`` when a token is accepted.
    """

    history: NDArray[np.int32]
    n_said: int
    n_vocab: int
    memory: Mapping[str, float]
    uniform: Callable[[], float]
    learned: dict[str, float] = field(default_factory=dict)

    def recent(self, window: int | None) -> NDArray[np.int32]:
        """The last tokens; all for None."""
        return self.history if window is None else self.history[-window:]


Step: TypeAlias = Callable[[Ids, Values, StepState], Candidates]
"""From candidates to candidates: ids int64 [n], ascending, a subset of the input; logits float [n], finite."""


class History:
    """The last tokens of a history.

    Args:
        window: the number of tokens to keep; None for all.
    """

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._buffer: NDArray[np.int32] = np.empty(64, np.int32)
        self._end = 0

    def append(self, token: int) -> None:
        """Add a token."""
        if self._window == 0:
            return
        if self._end == len(self._buffer):
            tokens = self.tokens
            self._buffer = np.empty(max(64, 2 * len(tokens)), np.int32)
            self._buffer[: len(tokens)] = tokens
            self._end = len(tokens)
        self._buffer[self._end] = token
        self._end += 1

    def replace(self, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Replace all tokens."""
        window = tokens if self._window is None else tokens[max(0, len(tokens) - self._window) :]
        self._buffer = np.array(window, np.int32)
        self._end = len(window)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The tokens, oldest first, int32 [n]; valid until the next change."""
        start = 0 if self._window is None else max(0, self._end - self._window)
        return self._buffer[start : self._end]

    def copy(self) -> Self:
        """An independent copy."""
        twin = type(self)(self._window)
        twin.replace(self.tokens)
        return twin
