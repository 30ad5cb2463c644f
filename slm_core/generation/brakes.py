"""Brakes: callbacks that are asked after each token whether to go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from slm_core.errors import InvalidOption
from slm_core.generation.events import Event


class BrakeAction(Enum):
    """What a brake decides."""

    CONTINUE = auto()
    """Go on, and do not ask the brakes after this one."""
    NEXT = auto()
    """No opinion: ask the next brake."""
    FINISH = auto()
    """The answer is complete."""
    STOP = auto()
    """End it as incomplete."""
    PAUSE = auto()
    """End it for now: ``generate()`` goes on as if it had never paused."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The answer so far, as a brake sees it.

    Attributes:
        tokens: its tokens.
        text: the text that came out; not what is held back.
    """

    tokens: Sequence[int]
    text: str


Brake: TypeAlias = Callable[[Event, Draft], BrakeAction]


def ask(brakes: Sequence[Brake], event: Event, draft: Draft) -> BrakeAction:
    """The first opinion; NEXT where no brake has one.

    Raises:
        InvalidOption: a brake gave something else.
    """
    for brake in brakes:
        action = brake(event, draft)
        if not isinstance(action, BrakeAction):
            raise InvalidOption(
                f"a brake gave {action!r} (accepted: BrakeAction.NEXT for no opinion, or another of them)"
            )
        if action is not BrakeAction.NEXT:
            return action
    return BrakeAction.NEXT
