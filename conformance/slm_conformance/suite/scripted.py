"""Samplers and callbacks that follow a script, for scenarios of generation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray


class Script:
    """A sampler that returns given tokens and ignores the logits."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)
        self._n_sampled = 0

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token."""
        token = self._tokens[self._n_sampled % len(self._tokens)]
        self._n_sampled += 1
        return token

    def accept(self, token: int) -> None:
        """Do nothing."""

    def set_history(self, tokens: Sequence[int]) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Go back to the first token."""
        self._n_sampled = 0

    def clone(self) -> Self:
        """A copy at the same token."""
        copied = type(self)(self._tokens)
        copied.set_state(self.state())
        return copied

    def state(self) -> bytes:
        """The number of sampled tokens."""
        return str(self._n_sampled).encode()

    def set_state(self, state: bytes) -> None:
        """Continue at a state."""
        self._n_sampled = int(state)


class CancelsAfter:
    """A ``cancelled`` callback: False at the first ``n`` calls, then True.

    Attributes:
        n_calls: the number of calls.
    """

    def __init__(self, n: float) -> None:
        self._n = n
        self.n_calls = 0

    def __call__(self) -> bool:
        """Whether to cancel."""
        self.n_calls += 1
        return self.n_calls > self._n


class SlowScript(Script):
    """A sampler that takes some seconds for each token, and raises once before the first token."""

    def __init__(self, tokens: Sequence[int], seconds: float) -> None:
        super().__init__(tokens)
        self._seconds, self._raises = seconds, True

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token."""
        time.sleep(self._seconds)
        if self._raises:
            self._raises = False
            raise KeyError("a sampler's own error")
        return super().sample(logits)
