"""The nouns Sampler and Constraint: logits in, token out; and what tokens are allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Forward:
    """The token was taken; go on sampling."""


@dataclass(frozen=True, slots=True)
class FastForward:
    """The token was taken, and these must follow it: they are decoded as one batch, without sampling.

    Each of them still goes through ``advance``, in order: they answer ``Forward`` until the last, and until then
    ``mask`` allows nothing else.
    """

    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Stop:
    """The token was taken and the constraint is complete: nothing may follow."""


Advance: TypeAlias = Forward | FastForward | Stop


class Sampler(Protocol):
    """Logits in, token out; deterministic for a seed."""

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose a token from one row of logits, float32 [V]; the row is not changed."""
        ...

    def accept(self, token: int) -> None:
        """Tell the sampler what was taken, so that penalties see it. Chosen, forced and prompt tokens alike."""
        ...

    def set_history(self, tokens: Sequence[int]) -> None:
        """Replace what penalties see: the history was edited. The stream of random numbers goes on."""
        ...

    def reset(self) -> None:
        """Back to the state at creation."""
        ...

    def clone(self) -> Self:
        """An independent copy that continues the same stream."""
        ...

    def state(self) -> bytes:
        """The exact state: after ``set_state`` the next draws continue the same stream."""
        ...

    def set_state(self, state: bytes) -> None:
        """Continue where ``state`` was taken.

        Raises:
            InvalidSnapshot: the bytes are not the state of such a sampler; nothing changed.
        """
        ...


class Constraint(Protocol):
    """What may be said next: a grammar, a JSON schema, a regular expression, a choice.

    One object follows one answer; ``constraints.compile`` makes them from a spec and a vocabulary.
    """

    @property
    def is_complete(self) -> bool:
        """Whether what was taken so far may end here: exactly then the EOG tokens are allowed."""
        ...

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy of one row of logits, float32 [V], with every token that may not follow at -inf.

        Raises:
            ConstraintError: working out what may follow ran out of its bounds; nothing changed.
        """
        ...

    def advance(self, token: int) -> Advance:
        """Take a token. An EOG token answers ``Stop``.

        Raises:
            InvalidToken: the token may not follow; nothing changed.
        """
        ...

    def clone(self) -> Self:
        """An independent copy that stands at the same place."""
        ...

    def state(self) -> bytes:
        """What was asked for and the tokens taken since: ``constraints.restore`` makes the same of it."""
        ...
