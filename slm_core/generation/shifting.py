"""Endless answers: when the context is full, tokens in the middle of the history are dropped."""

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
    """Drop tokens from the history when the context is full, and continue.

    The first ``keep`` tokens stay, because models attend to them strongly (attention sinks: Xiao et al., arXiv
    2309.17453). If the context can cut, later tokens keep their values; otherwise they are decoded again.

    Attributes:
        keep: the number of tokens at the beginning that stay.
        share: the share of the later tokens that is dropped at a time, oldest first.

    Raises:
        InvalidOption: a value is out of range.
    """

    keep: int = 4
    share: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.keep, int) or isinstance(self.keep, bool) or self.keep < 1:
            raise InvalidOption(f"keep={self.keep!r} (accepted: an integer from 1 on)")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share < 1:
            raise InvalidOption(f"share={self.share!r} (accepted: a number between 0 and 1)")


class ShiftableHistory(TokenSource, Protocol):
    """A token source that can drop a range of its history in the middle of an answer."""

    def whole_blocks(self, start: int, end: int) -> tuple[int, int]:
        """The range without the ends that divide a bidirectional block; it may be empty."""
        ...

    def shift_out(self, start: int, end: int) -> EditLevel:
        """Remove [start, end) of the history; the running answer continues."""
        ...


class ShiftingSource:
    """A ``loop.TokenSource`` that drops tokens of its history when the context is full."""

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
        """Tokens of the history that are not decoded yet."""
        return self._history.n_pending

    def next_logits(
        self,
        cancelled: Callable[[], bool],
        *,
        expected: Sequence[int] = (),
        progress: PrefillProgress | None = None,
    ) -> NDArray[np.float32] | None:
        """The logits after the history, float32 [V]; drops tokens if the context is full."""
        while True:
            try:
                return self._history.next_logits(cancelled, expected=expected, progress=progress)
            except ContextFull:
                keep, n_tokens = self._shift.keep, self._history.n_tokens
                if n_tokens - keep < 2:  # no token between the kept tokens and the last token
                    raise
                end = keep + min(n_tokens - keep - 1, math.ceil((n_tokens - keep) * self._shift.share))
                start, end = self._history.whole_blocks(keep, end)
                if start == end:
                    raise
                self._note(end - start, self._history.shift_out(start, end))

    def take(self, token: int) -> None:
        """Add a token to the history."""
        self._history.take(token)

    def settle(self) -> None:
        """Forget tokens that were decoded ahead of the history."""
        self._history.settle()

    def _note(self, n_tokens: int, level: EditLevel) -> None:
        if self.overflowed is not None:
            n_tokens, level = n_tokens + self.overflowed.n_tokens, min(level, self.overflowed.level)
        self.overflowed = Overflowed("shift", (), None, n_tokens, level)
