"""Answers without end: when the context is full, the middle of the history makes room."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import ContextFull, InvalidOption
from slm_core.generation.events import Overflowed
from slm_core.generation.loop import TokenSource
from slm_core.types import EditLevel, PrefillProgress


@dataclass(frozen=True, slots=True)
class TokenShift:
    """Drop tokens from the history when the context is full, and go on.

    The first ``keep`` tokens stay: models rest much of their attention on them (attention sinks: Xiao et al., arXiv
    2309.17453). Where the context can cut, what follows keeps what it saw; else it is computed again.

    Attributes:
        keep: tokens at the beginning that stay.
        share: of the tokens after them, the share that is dropped at a time, the oldest ones.

    Raises:
        InvalidOption: a value out of its range.
    """

    keep: int = 4
    share: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.keep, int) or isinstance(self.keep, bool) or self.keep < 1:
            raise InvalidOption(f"keep={self.keep!r} (accepted: an integer from 1 on)")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share < 1:
            raise InvalidOption(f"share={self.share!r} (accepted: a number between 0 and 1)")


class ShiftableHistory(TokenSource, Protocol):
    """A token source whose history can lose a span in mid-answer."""

    def shift_out(self, start: int, end: int) -> EditLevel:
        """Forget [start, end) of the history; the answer that is being made goes on."""
        ...


class ShiftingSource:
    """A history that drops tokens where it would not fit; see ``loop.TokenSource``."""

    def __init__(self, history: ShiftableHistory, shift: TokenShift) -> None:
        self._history = history
        self._shift = shift
        self.overflowed: Overflowed | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens of the history."""
        return self._history.n_tokens

    @property
    def n_pending(self) -> int:
        """Those of them that have yet to be decoded."""
        return self._history.n_pending

    def next_logits(
        self,
        cancelled: Callable[[], bool],
        *,
        expected: Sequence[int] = (),
        progress: PrefillProgress | None = None,
    ) -> NDArray[np.float32] | None:
        """The logits that follow, float32 [V], whatever has to be dropped for them."""
        while True:
            try:
                return self._history.next_logits(cancelled, expected=expected, progress=progress)
            except ContextFull:
                keep, n_tokens = self._shift.keep, self._history.n_tokens
                if n_tokens - keep < 2:  # nothing between what stays and the last token
                    raise
                end = keep + min(n_tokens - keep - 1, math.ceil((n_tokens - keep) * self._shift.share))
                self._note(end - keep, self._history.shift_out(keep, end))

    def take(self, token: int) -> None:
        """Add a token to the history."""
        self._history.take(token)

    def settle(self) -> None:
        """Forget what was decoded ahead of the history."""
        self._history.settle()

    def _note(self, n_tokens: int, level: EditLevel) -> None:
        if self.overflowed is not None:
            n_tokens, level = n_tokens + self.overflowed.n_tokens, min(level, self.overflowed.level)
        self.overflowed = Overflowed("shift", (), None, n_tokens, level)
