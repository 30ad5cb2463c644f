"""Stopping criteria: callbacks that are asked after each token whether to go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from slm_core.errors import InvalidOption
from slm_core.generation.events import Event


class StoppingAction(Enum):
    """What a stopping criterion decides."""

    CONTINUE = auto()
    """Go on, and do not ask the stopping criteria after this one."""
    NEXT = auto()
    """No opinion: ask the next stopping criterion."""
    FINISH = auto()
    """The answer is complete."""
    STOP = auto()
    """End it as incomplete."""
    PAUSE = auto()
    """End it for now: ``generate()`` goes on as if it had never paused."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The answer so far, as a stopping criterion sees it.

    Attributes:
        tokens: its tokens.
        text: the text that came out; not what is held back.
    """

    tokens: Sequence[int]
    text: str


StoppingCriterion: TypeAlias = Callable[[Event, Draft], StoppingAction]


def ask(stopping_criteria: Sequence[StoppingCriterion], event: Event, draft: Draft) -> StoppingAction:
    """The first opinion; NEXT where no stopping criterion has one.

    Raises:
        InvalidOption: a stopping criterion gave something else.
    """
    for criterion in stopping_criteria:
        action = criterion(event, draft)
        if not isinstance(action, StoppingAction):
            raise InvalidOption(
                f"a stopping criterion gave {action!r} (accepted: a StoppingAction; NEXT for no opinion)"
            )
        if action is not StoppingAction.NEXT:
            return action
    return StoppingAction.NEXT
