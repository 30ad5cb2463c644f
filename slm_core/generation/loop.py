"""The generation loop: decode, choose, show, ask the stopping criteria; over anything that has a next row of logits."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import ContextFull, SessionError
from slm_core.generation.aio import EventStream
from slm_core.generation.control import Control, Countdown, checked_timeout
from slm_core.generation.events import Answer, Event, FinishReason, Logprobs, Timings, Usage
from slm_core.generation.logprobs import logprobs_of, wanted_logprobs
from slm_core.generation.stopping import Draft, StoppingAction, StoppingCriterion, ask
from slm_core.generation.text import TextStream
from slm_core.generation.top import Row, TopChoice, TopRow
from slm_core.numerics import log_probability
from slm_core.protocols import Constraint, FastForward, Sampler, Stop, Vocab
from slm_core.types import PrefillProgress

if TYPE_CHECKING:
    from slm_core.generation.shifting import ShiftingSource
    from slm_core.generation.speculation.settings import Speculation
    from slm_core.generation.speculation.source import SpeculativeSource

_ENDS_OF_ACTIONS = {StoppingAction.FINISH: FinishReason.STOP, StoppingAction.STOP: FinishReason.CANCELLED}


class TokenSource(Protocol):
    """What a generation extends: a history of tokens with a next row of logits."""

    @property
    def n_tokens(self) -> int:
        """Tokens of the history."""
        ...

    @property
    def n_pending(self) -> int:
        """Those of them that have yet to be decoded."""
        ...

    def next_logits(
        self,
        cancelled: Callable[[], bool],
        *,
        expected: Sequence[int] = (),
        progress: PrefillProgress | None = None,
    ) -> NDArray[np.float32] | None:
        """Decode what is pending, then the logits that follow it, float32 [V]; None where ``cancelled`` came true.

        Args:
            cancelled: asked before each batch.
            expected: tokens that are likely to follow, to be decoded along.
            progress: called after each batch.
        """
        ...

    def take(self, token: int) -> None:
        """Add a token to the history."""
        ...

    def settle(self) -> None:
        """Forget what was decoded ahead of the history."""
        ...


@dataclass(slots=True)
class Progress:
    """The part of a generation that outlives a pause, and a dump.

    Attributes:
        n_prompt: tokens before the answer.
        n_cached: of those, tokens that were decoded already.
        max_tokens: the longest answer, or None.
        stops: texts that end it.
        tokens: its tokens so far.
        text: its text so far.
        pending: bytes of an incomplete character.
        held: text that may become a stop text.
        forced: tokens that the constraint says must come next.
        queue_s: seconds until the first step began; None before that.
        prefill_s: seconds of the first step.
        decode_s: seconds of the others.
        first_token_s: seconds from the beginning to the first token; None before that.
        time_left_s: seconds after which it is cancelled, pauses not counted; None where it has no timeout.
    """

    n_prompt: int
    n_cached: int
    max_tokens: int | None
    stops: tuple[str, ...]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    pending: bytes = b""
    held: str = ""
    forced: list[int] = field(default_factory=list)
    queue_s: float | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float | None = None
    time_left_s: float | None = None

    @property
    def n_left(self) -> int | None:
        """Tokens that may still come; None for any number."""
        return None if self.max_tokens is None else self.max_tokens - len(self.tokens)


class Generation(EventStream):
    """An answer in the making: iterate for its events, then ask for ``answer``.

    Args:
        source: the history it extends.
        vocab: for the bytes of tokens.
        sampler: chooses them; it is told what is taken.
        progress: where it stands; a fresh one, or that of a paused generation.
        control: what watches over it.
        constraint: what may be said.
        speculation: the source, where it is drafted for.
        shifting: the source, where it drops tokens of the history.
        top: how to choose where only the largest logits are there; None where nothing picks them.
        special: whether control tokens other than EOG become text.
        paused: whether it waits for ``resume``.
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
        speculation: SpeculativeSource | None = None,
        shifting: ShiftingSource | None = None,
        top: TopChoice | None = None,
        special: bool = False,
        paused: bool = False,
    ) -> None:
        self._source = source
        self._vocab = vocab
        self.sampler = sampler
        self._logprobs = wanted_logprobs(sampler)
        self._control = control if control is not None else Control()
        self._constraint = constraint
        self.speculation = speculation
        self.shifting = shifting
        self._top = top
        self.special = special
        self._forced = deque(progress.forced)
        self._cancelled = threading.Event()
        self._countdown = Countdown(progress.time_left_s)
        self._timed_out = False
        self._stream = TextStream(progress.stops, progress.pending, progress.held)
        self._progress = progress
        self._made_at = time.perf_counter()
        self._reason: FinishReason | None = None
        self._shown = True
        self.paused = paused

    @property
    def finished(self) -> bool:
        """Whether the answer is over."""
        return self._reason is not None

    @property
    def constraint(self) -> Constraint | None:
        """What rules it, where it stands."""
        return self._constraint

    @property
    def needs_drafter(self) -> bool:
        """Whether it comes out of a dump without the code or model that drafts for it."""
        return self.speculation is not None and self.speculation.needs_drafter

    def draft_with(self, speculation: Speculation | None) -> None:
        """Give the drafter again.

        Raises:
            SessionError: none was given, or none is missing.
        """
        if self.speculation is None:
            raise SessionError("a generation is paused that nothing drafts for: go on without options")
        self.speculation.give(speculation)

    @property
    def progress(self) -> Progress:
        """Where it stands."""
        self._progress.pending, self._progress.held = self._stream.pending, self._stream.held
        self._progress.forced = list(self._forced)
        self._progress.time_left_s = self._countdown.left
        return self._progress

    @property
    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            SessionError: it is not over yet.
        """
        if self._reason is None:
            state = "paused: call generate() to go on" if self.paused else "not over: iterate it to its end"
            raise SessionError(f"there is no answer yet, the generation is {state}")
        p = self._progress
        return Answer(
            p.text,
            self._reason,
            tuple(p.tokens),
            Usage(p.n_prompt, p.n_cached, len(p.tokens)),
            Timings(p.prefill_s, p.decode_s, p.queue_s or 0.0, p.first_token_s),
            timed_out=self._timed_out,
            speculation=None if self.speculation is None else self.speculation.stats,
            overflowed=None if self.shifting is None else self.shifting.overflowed,
        )

    def cancel(self) -> None:
        """End it as soon as possible, from any thread or task; in prefill, within one batch."""
        self._cancelled.set()

    def show_events(self, shown: bool) -> None:
        """Whether events go to anybody, from now on."""
        self._shown = shown

    def resume(
        self,
        stopping_criteria: Sequence[StoppingCriterion] | None = None,
        *,
        timeout: float | None = None,
        on_event: Callable[[Event], None] | None = None,
        progress: PrefillProgress | None = None,
    ) -> Self:
        """Go on after a pause; what is not given stays as it was. See ``Session.generate``."""
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
        if self._reason is not None or self.paused:
            raise StopIteration
        self._countdown.start()
        started = time.perf_counter()
        if self._progress.queue_s is None:
            self._progress.queue_s = started - self._made_at
        n_before = len(self._progress.tokens)
        try:
            event = self._next_event()
        finally:
            self._clock(started, n_before)
        if self._control.on_event is not None:
            self._control.on_event(event)
        return event

    def _next_event(self) -> Event:
        if self._progress.max_tokens is not None and len(self._progress.tokens) >= self._progress.max_tokens:
            return self._end_without_token(FinishReason.LENGTH)
        row = self._next_row()
        if row is None:
            self._timed_out = not self._cancelled.is_set()
            return self._end_without_token(FinishReason.CANCELLED)
        if isinstance(row, TopRow):
            return self._step_top(row)
        if row.size == 0:
            return self._end_without_token(FinishReason.LENGTH)
        return self._step(row)

    def _next_row(self) -> Row | None:
        """The next row; None where cancelled, an empty row where the context is full in mid-answer."""
        if self._is_cancelled():
            return None
        begun = bool(self._progress.tokens)
        progress = None if begun else self._control.progress
        try:
            if self._top is not None:
                return self._top.next_row(self._is_cancelled, progress)
            return self._source.next_logits(self._is_cancelled, expected=self._expected(), progress=progress)
        except ContextFull:
            if not begun:
                raise
            return np.empty(0, np.float32)

    def _is_cancelled(self) -> bool:
        return self._cancelled.is_set() or self._countdown.is_over

    def _expected(self) -> Sequence[int]:
        """What must follow, as far as the answer may still go and one more token is to be chosen after it."""
        if not self._forced:
            return ()
        n_left = self._progress.n_left
        return tuple(self._forced)[: None if n_left is None else n_left - 1]

    def _step(self, logits: NDArray[np.float32]) -> Event:
        token = self._choose(logits)
        logprob, logprobs = math.nan, None
        if self._shown or self._control.sees_events:
            logprob = log_probability(logits, token)
            logprobs = logprobs_of(self._logprobs, logits, token) if self._logprobs is not None else None
        return self._taken(token, logprob, logprobs)

    def _step_top(self, row: TopRow) -> Event:
        assert self._top is not None, "nothing else asks for such a row"
        return self._taken(*self._top.choose(row), None)

    def _taken(self, token: int, logprob: float, logprobs: Logprobs | None) -> Event:
        ends = self._advance(token)
        self._source.take(token)
        self.sampler.accept(token)
        self._progress.tokens.append(token)
        data = b"" if token in self._vocab.eog_ids else self._vocab.token_bytes(token, special=self.special)
        text, stopped = self._stream.feed(data)
        self._progress.text += text
        ends = FinishReason.STOP if stopped else ends
        return self._close_step(Event(token, text, logprob, logprobs=logprobs), ends, stopped=stopped)

    def _close_step(self, event: Event, ends: FinishReason | None, *, stopped: bool) -> Event:
        """Ask the stopping criteria about a token, end where it is time, and complete its event."""
        progress, action = self._progress, StoppingAction.NEXT
        if self._control.stopping_criteria:
            try:
                action = ask(self._control.stopping_criteria, event, Draft(progress.tokens, progress.text))
            except BaseException:
                if ends is not None:  # the token has ended the answer, whatever a stopping criterion makes of it
                    self._finish(ends, flush=not stopped)
                raise
            ends = ends or _ENDS_OF_ACTIONS.get(action)
        if ends is None and progress.max_tokens is not None and len(progress.tokens) >= progress.max_tokens:
            ends = FinishReason.LENGTH
        if ends is not None:
            rest = self._finish(ends, flush=not stopped)
            return replace(event, text=event.text + rest) if rest else event
        if action is StoppingAction.PAUSE:
            self._countdown.stop()
            self.paused = True
        return event

    def _choose(self, logits: NDArray[np.float32]) -> int:
        if self._forced:
            return self._forced.popleft()
        if self._constraint is not None:
            logits = self._constraint.mask(logits)
        if self.speculation is not None:
            return self.speculation.choose(self.sampler, logits)
        return self.sampler.sample(logits)

    def _advance(self, token: int) -> FinishReason | None:
        """Move the constraint on; returns why the answer ends with this token, if it does."""
        ends = FinishReason.STOP if token in self._vocab.eog_ids else None
        if self._constraint is None:
            return ends
        moved = self._constraint.advance(token)
        if ends is not None:
            return ends
        if isinstance(moved, FastForward):
            self._forced = deque(moved.tokens)
        return FinishReason.CONSTRAINT if isinstance(moved, Stop) else None

    def _end_without_token(self, reason: FinishReason) -> Event:
        text = self._finish(reason, flush=True)
        if not text:
            raise StopIteration
        return Event(None, text, math.nan)

    def _finish(self, reason: FinishReason, *, flush: bool) -> str:
        """End the answer; returns text that was held back."""
        text, stopped = self._stream.flush() if flush else ("", False)
        self._source.settle()
        self._progress.text += text
        self._reason = FinishReason.STOP if stopped else reason
        return text

    def _clock(self, started: float, n_before: int) -> None:
        """Note the seconds of a step."""
        progress, now = self._progress, time.perf_counter()
        if n_before:
            progress.decode_s += now - started
            return
        progress.prefill_s += now - started
        if progress.tokens:
            progress.first_token_s = now - self._made_at
