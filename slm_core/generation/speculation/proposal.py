"""What is drafted, and what drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidOption

DraftProbabilities: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float64]]
"""A distribution: the n tokens that may come, int64 [n], and their probabilities, float64 [n]."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a history.

    Attributes:
        tokens: in order.
        draft_probabilities: for each token the distribution that it was drawn from; empty where nothing was drawn.
    """

    tokens: Sequence[int]
    draft_probabilities: Sequence[DraftProbabilities] = ()

    def __post_init__(self) -> None:
        if self.draft_probabilities and len(self.draft_probabilities) != len(self.tokens):
            raise InvalidOption(
                f"a proposal of {len(self.tokens)} tokens has {len(self.draft_probabilities)} distributions"
            )


NOTHING = Proposal(())


def never() -> bool:
    """Nobody cancels."""
    return False


class Drafter(Protocol):
    """Guesses what follows. A guess costs time where it is wrong, and never changes what is said."""

    def draft(self, tokens: Sequence[int], n: int, cancelled: Callable[[], bool] = never) -> Proposal:
        """Up to ``n`` tokens that may follow ``tokens``.

        Args:
            tokens: a whole history; it must not be changed, nor kept.
            n: the most tokens.
            cancelled: asked before each batch that a draft takes; where it comes true, nothing is drafted.
        """
        ...

    def settings(self) -> Mapping[str, object] | None:
        """JSON values that ``drafter_of`` makes the same drafter of; None for code, which no dump can hold."""
        ...


class DraftFunction:
    """Asks a function of the history and a number for at most so many tokens.

    Args:
        function: called with the history, which it must not change, and the number.
    """

    def __init__(self, function: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self._function = function

    def draft(self, tokens: Sequence[int], n: int, cancelled: Callable[[], bool] = never) -> Proposal:
        """What the function says, ``n`` tokens of it at most."""
        return Proposal(tuple(self._function(tokens, n))[:n])

    def settings(self) -> None:
        """Code is in no dump."""
        return
