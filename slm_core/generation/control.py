"""What watches over an answer while it is made: code of the caller, and time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slm_core.errors import InvalidOption
from slm_core.generation.events import Event
from slm_core.generation.stopping import StoppingCriterion
from slm_core.types import PrefillProgress


@dataclass(frozen=True, slots=True)
class Control:
    """The caller's code; it is in no dump.

    Attributes:
        stopping_criteria: asked in order after each token.
        on_event: called with each event, before the iteration yields it; what it raises comes out there.
        progress: called with the tokens of the prompt that are decoded and those there are to decode.
    """

    stopping_criteria: Sequence[StoppingCriterion] = ()
    on_event: Callable[[Event], None] | None = None
    progress: PrefillProgress | None = None

    @property
    def sees_events(self) -> bool:
        """Whether any of it is given events."""
        return bool(self.stopping_criteria) or self.on_event is not None


class Countdown:
    """Seconds that run while it is started.

    Args:
        seconds: how many there are; None for no end.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._ends_at: float | None = None

    @property
    def left(self) -> float | None:
        """Seconds that are left, 0.0 at least; None where there is no end."""
        if self._ends_at is None:
            return self._seconds
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether none are left."""
        return self._ends_at is not None and time.monotonic() >= self._ends_at

    def start(self) -> None:
        """Let them run."""
        if self._ends_at is None and self._seconds is not None:
            self._ends_at = time.monotonic() + self._seconds

    def stop(self) -> None:
        """Keep what is left."""
        self._seconds, self._ends_at = self.left, None


def checked_timeout(seconds: float | None) -> float | None:
    """A timeout that is a number above 0, or None.

    Raises:
        InvalidOption: it is neither.
    """
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise InvalidOption(f"timeout={seconds!r} (accepted: seconds above 0, or None)")
    return float(seconds)
