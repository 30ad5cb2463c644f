"""Controls of a running answer: the caller's callbacks, and the timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from slm_core.argument_checks import check_function, checked_functions
from slm_core.errors import InvalidOption
from slm_core.generation.events import Event
from slm_core.generation.stopping import StoppingCriterion
from slm_core.numerics import as_finite, shown
from slm_core.types import PrefillProgress


@dataclass(frozen=True, slots=True)
class Control:
    """The caller's callbacks; dumps do not contain them.

    Attributes:
        stopping_criteria: called in order after each token.
        on_event: called with each event, before the iteration yields it; its exceptions leave the iteration.
        progress: called with the number of decoded prompt tokens, and the number of prompt tokens to decode.

    Raises:
        InvalidOption: a callback cannot be called, or the stopping criteria are no list.
    """

    stopping_criteria: Sequence[StoppingCriterion] = ()
    on_event: Callable[[Event], None] | None = None
    progress: PrefillProgress | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stopping_criteria", checked_functions("stopping_criteria", self.stopping_criteria))
        check_function("on_event", self.on_event)
        check_function("progress", self.progress)

    @property
    def sees_events(self) -> bool:
        """Whether a callback takes events."""
        return bool(self.stopping_criteria) or self.on_event is not None


class _Callbacks:
    """A block that calls functions of the caller. Their ``StopIteration`` would end the loop over events in silence.

    As in a generator (PEP 479), it becomes a ``RuntimeError``.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, StopIteration):
            raise RuntimeError("a callback raised StopIteration") from error


callbacks = _Callbacks()


class Countdown:
    """A timer that counts down while it is started.

    Args:
        seconds: its length; None for no end.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._ends_at: float | None = None

    @property
    def left(self) -> float | None:
        """Seconds left, at least 0.0; None for no end."""
        if self._ends_at is None:
            return self._seconds
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self._ends_at is not None and time.monotonic() >= self._ends_at

    def start(self) -> None:
        """Start the timer."""
        if self._ends_at is None and self._seconds is not None:
            self._ends_at = time.monotonic() + self._seconds

    def stop(self) -> None:
        """Pause the timer."""
        self._seconds, self._ends_at = self.left, None


def checked_timeout(seconds: float | None) -> float | None:
    """The timeout, if it is a number above 0 or None.

    Raises:
        InvalidOption: the timeout is invalid.
    """
    if seconds is None:
        return None
    number = as_finite(seconds)
    if number is None or number <= 0:
        raise InvalidOption(f"timeout={shown(seconds)} (accepted: seconds above 0, or None)")
    return number
