"""The nouns Sampler and Constraint: a sampler chooses tokens from logits, a constraint restricts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Forward:
    """The token was consumed; continue sampling."""


@dataclass(frozen=True, slots=True)
class FastForward:
    """The token was consumed, and ``tokens`` must follow it: they are decoded as one batch, without sampling.

    The caller passes each of them to ``advance``, in order. ``advance`` returns ``Forward`` until the last one, and
    until then ``mask`` allows no other token.
    """

    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Stop:
    """The token was consumed and the constraint is complete: no token may follow."""


Advance: TypeAlias = Forward | FastForward | Stop


class Sampler(Protocol):
    """Chooses tokens from logits; deterministic for a seed."""

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose a token from one row of logits, float32 [V]; the row is not changed."""
        ...

    def accept(self, token: int) -> None:
        """Add a token to the history of penalties: a chosen, forced or prompt token."""
        ...

    def set_history(self, tokens: Sequence[int]) -> None:
        """Replace the history of penalties, after an edit. The stream of random numbers continues."""
        ...

    def reset(self) -> None:
        """Reset to the initial state."""
        ...

    def clone(self) -> Self:
        """An independent copy that continues the same stream."""
        ...

    def state(self) -> bytes:
        """The exact state: after ``set_state`` the next draws continue the same stream."""
        ...

    def set_state(self, state: bytes) -> None:
        """Restore the result of ``state``.

        Raises:
            InvalidSnapshot: the bytes are not the state of a sampler of this kind; nothing changed.
        """
        ...


class Constraint(Protocol):
    """Restricts the next token: a grammar, a JSON schema, a regular expression, a choice.

    One object is for one answer; ``constraints.compile`` makes it from a spec and a vocabulary.
    """

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here; EOG tokens are allowed if and only if it may."""
        ...

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy of one row of logits, float32 [V], with -inf for tokens that may not follow.

        Raises:
            ConstraintError: computing the mask exceeded the limits; nothing changed.
        """
        ...

    def advance(self, token: int) -> Advance:
        """Consume a token. An EOG token returns ``Stop``.

        Raises:
            InvalidToken: the token may not follow; nothing changed.
        """
        ...

    def clone(self) -> Self:
        """An independent copy in the same state."""
        ...

    def state(self) -> bytes:
        """The spec and the consumed tokens, for ``constraints.restore``."""
        ...
