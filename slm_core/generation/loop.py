"""The generation loop: decode, then a step of the token loop, for any source of logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from slm_core.display import count, preview, signature
from slm_core.errors import ContextFull, SessionError
from slm_core.generation.aio import EventStream
from slm_core.generation.control import Control, Countdown, callbacks, checked_timeout
from slm_core.generation.events import Event, FinishReason
from slm_core.generation.stopping import StoppingCriterion
from slm_core.generation.token_loop import Progress, TokenHistory, TokenLoop
from slm_core.generation.top import Row, TopChoice
from slm_core.protocols import Constraint, Sampler, Vocab
from slm_core.types import PrefillProgress

if TYPE_CHECKING:
    from slm_core.generation.shifting import ShiftingSource
    from slm_core.generation.speculation.rounds import DraftRounds
    from slm_core.generation.speculation.settings import Speculation


class TokenSource(TokenHistory, Protocol):
    """A history of tokens that a generation extends, and its next row of logits."""

    @property
    def n_tokens(self) -> int:
        """Tokens of the history."""
        ...

    @property
    def n_pending(self) -> int:
        """Tokens of the history that are not decoded yet."""
        ...

    def next_logits(
        self,
        cancelled: Callable[[], bool],
        *,
        expected: Sequence[int] = (),
        progress: PrefillProgress | None = None,
    ) -> NDArray[np.float32] | None:
        """Decode pending tokens; returns the logits after them, float32 [V], or None if ``cancelled`` returned True.

        Args:
            cancelled: called before each batch.
            expected: likely next tokens, which may be decoded in the same batch.
            progress: called after each batch.
        """
        ...


class Generation(TokenLoop, EventStream):
    """A running generation: iterate over its events, then read ``answer``.

    Args:
        source: the history that it extends, and its rows of logits.
        guard: makes a block around each step, which keeps other threads out.

    For the other arguments see ``token_loop.TokenLoop``.
    """

    def __init__(
        self,
        source: TokenSource,
        vocab: Vocab,
        sampler: Sampler,
        progress: Progress,
        *,
        control: Control | None = None,
        constraint: Constraint | None = None,
        speculation: DraftRounds | None = None,
        shifting: ShiftingSource | None = None,
        top: TopChoice | None = None,
        special: bool = False,
        paused: bool = False,
        guard: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        super().__init__(
            source,
            vocab,
            sampler,
            progress,
            control=control,
            constraint=constraint,
            speculation=speculation,
            shifting=shifting,
            top=top,
            special=special,
        )
        self._source = source
        self.paused = paused
        self._guard = guard

    def __repr__(self) -> str:
        state = "over" if self.finished else "paused" if self.paused else "running"
        return signature(self, state, count(len(self._progress.tokens), "token"), preview(self._progress.text))

    @property
    def needs_drafter(self) -> bool:
        """Whether it was restored from a dump without its drafter."""
        return self.speculation is not None and self.speculation.needs_drafter

    def draft_with(self, speculation: Speculation | None) -> None:
        """Set the drafter of a restored generation.

        Raises:
            SessionError: ``speculation`` is None, or no drafter is missing.
        """
        if self.speculation is None:
            raise SessionError(
                "a generation without a drafter is paused: call generate() without options to continue it"
            )
        self.speculation.give(speculation)

    def resume(
        self,
        stopping_criteria: Sequence[StoppingCriterion] | None = None,
        *,
        timeout: float | None = None,
        on_event: Callable[[Event], None] | None = None,
        progress: PrefillProgress | None = None,
    ) -> Self:
        """Resume after a pause; None keeps the old value. See ``Session.generate``."""
        seconds = checked_timeout(timeout)
        before = self._control
        self._control = Control(
            before.stopping_criteria if stopping_criteria is None else stopping_criteria,
            before.on_event if on_event is None else on_event,
            before.progress if progress is None else progress,
        )
        if seconds is not None:
            self._countdown = Countdown(seconds)
        self.paused = False
        return self

    def __next__(self) -> Event:
        with self._guard():
            return self._next()

    def _next(self) -> Event:
        if self.finished or self.paused:
            raise StopIteration
        self.start_timeout()
        self.start_prefill()
        started, n_before = time.perf_counter(), len(self._progress.tokens)
        try:
            with callbacks:
                event = self._next_event()
        finally:
            self._note_seconds(time.perf_counter() - started, n_before)
        if event is None:
            raise StopIteration
        with callbacks:
            self._report(event)
        return event

    def _next_event(self) -> Event | None:
        if self._progress.max_tokens is not None and len(self._progress.tokens) >= self._progress.max_tokens:
            return self._end(FinishReason.LENGTH)
        if self.interrupted:
            return self._end(FinishReason.CANCELLED)
        try:
            row = self._next_row()
        except ContextFull:
            if not self._progress.tokens:
                raise
            return self._end(FinishReason.LENGTH)
        return self._end(FinishReason.CANCELLED) if row is None else self._step(row)

    def _next_row(self) -> Row | None:
        """The next row; None if the generation was interrupted."""
        progress = None if self._progress.tokens else self._control.progress
        if self._top is not None:
            return self._top.next_row(lambda: self.interrupted, progress)
        return self._source.next_logits(lambda: self.interrupted, expected=self.expected, progress=progress)
