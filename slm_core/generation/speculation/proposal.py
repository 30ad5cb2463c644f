"""Drafts, and the protocol of drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.argument_checks import refused
from slm_core.errors import InvalidOption

DraftProbabilities: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float64]]
"""A distribution: the n possible tokens, int64 [n], and their probabilities, float64 [n]."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a history.

    Attributes:
        tokens: the tokens, in order.
        draft_probabilities: for each token the distribution that it was drawn from; empty for greedy drafts.
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
    """The default of ``cancelled``: never."""
    return False


class Drafter(Protocol):
    """Proposes next tokens. A rejected proposal costs time, but never changes the answer."""

    def draft(self, tokens: Sequence[int], n: int, cancelled: Callable[[], bool] = never) -> Proposal:
        """Propose up to ``n`` tokens after ``tokens``.

        Args:
            tokens: the whole history; the drafter must not change or keep it.
            n: the largest number of tokens.
            cancelled: called before each batch of the draft; if it returns True, the draft is empty.
        """
        ...

    def settings(self) -> Mapping[str, object] | None:
        """JSON values from which ``drafter_of`` makes the same drafter; None for code, which dumps cannot contain."""
        ...


class DraftFunction:
    """Drafts with a function.

    Args:
        function: called with the history, which it must not change, and the largest number of tokens to return.

    Raises:
        InvalidOption: it cannot be called.
    """

    def __init__(self, function: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        if not callable(function):
            raise refused("function", function, "a function of the history and a number")
        self._function = function

    def __repr__(self) -> str:
        return f"DraftFunction({self._function!r})"

    def draft(self, tokens: Sequence[int], n: int, cancelled: Callable[[], bool] = never) -> Proposal:
        """The first ``n`` tokens of the function's result."""
        return Proposal(tuple(self._function(tokens, n))[:n])

    def settings(self) -> None:
        """None: dumps do not contain code."""
        return
