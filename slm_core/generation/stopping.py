"""Stopping criteria: callbacks that decide after each token whether to continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from slm_core.errors import InvalidOption
from slm_core.generation.events import Event


class StoppingAction(Enum):
    """The decision of a stopping criterion."""

    CONTINUE = auto()
    """Continue, and do not call the later stopping criteria."""
    NEXT = auto()
    """No decision: call the next stopping criterion."""
    FINISH = auto()
    """End the answer as complete."""
    STOP = auto()
    """End the answer as incomplete."""
    PAUSE = auto()
    """Pause the answer: ``generate()`` resumes it as if it had never paused."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The answer so far, for a stopping criterion.

    Attributes:
        tokens: its tokens.
        text: its text so far, without held-back text.
    """

    tokens: Sequence[int]
    text: str


StoppingCriterion: TypeAlias = Callable[[Event, Draft], StoppingAction | bool]
"""Returns its decision; True for FINISH, False for NEXT."""


def ask(stopping_criteria: Sequence[StoppingCriterion], event: Event, draft: Draft) -> StoppingAction:
    """The first decision of the stopping criteria; NEXT if none decides.

    Raises:
        InvalidOption: a stopping criterion returned another type.
    """
    for criterion in stopping_criteria:
        action = criterion(event, draft)
        if isinstance(action, bool):
            action = StoppingAction.FINISH if action else StoppingAction.NEXT
        if not isinstance(action, StoppingAction):
            raise InvalidOption(f"a stopping criterion gave {action!r} (accepted: a StoppingAction, True or False)")
        if action is not StoppingAction.NEXT:
            return action
    return StoppingAction.NEXT
