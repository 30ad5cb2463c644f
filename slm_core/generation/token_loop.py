"""The token loop: choose a token from a row of logits, make text of it, ask the stopping criteria.

Whoever computes rows hands them in, one a step: ``loop.Generation`` for one history, ``slm_core.engine`` for many.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import SessionError
from slm_core.generation.control import Control, Countdown
from slm_core.generation.events import Answer, Event, FinishReason, Logprobs, Timings, Usage
from slm_core.generation.logprobs import logprobs_of, wanted_logprobs
from slm_core.generation.stopping import Draft, StoppingAction, ask
from slm_core.generation.text import TextStream
from slm_core.generation.top import Row, TopChoice, TopRow
from slm_core.numerics import log_probability
from slm_core.protocols import Constraint, FastForward, Sampler, Stop, Vocab

if TYPE_CHECKING:
    from slm_core.generation.shifting import ShiftingSource
    from slm_core.generation.speculation.source import SpeculativeSource

_ENDS_OF_ACTIONS = {StoppingAction.FINISH: FinishReason.STOP, StoppingAction.STOP: FinishReason.CANCELLED}


class TokenHistory(Protocol):
    """The tokens that an answer extends."""

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


class TokenLoop:
    """An answer in the making, one row of logits a step: ``step`` with each row, or ``end`` where none follows.

    Args:
        history: the tokens it extends.
        vocab: for the bytes of tokens.
        sampler: chooses tokens; it is told each token that is taken.
        progress: where it stands; a fresh one, or that of a paused generation.
        control: the caller's callbacks.
        constraint: what may be said.
        speculation: the source, where it is drafted for.
        shifting: the source, where it drops tokens of the history.
        top: how to choose where only the largest logits are there; None where nothing picks them.
        special: whether control tokens other than EOG become text.

    Attributes:
        paused: whether a stopping criterion stopped it for now.
    """

    def __init__(
        self,
        history: TokenHistory,
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
    ) -> None:
        self._history = history
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
        self.paused = False

    @property
    def finished(self) -> bool:
        """Whether the answer is over."""
        return self._reason is not None

    @property
    def interrupted(self) -> bool:
        """Whether it was cancelled, or its time is over: ``end`` it as cancelled."""
        return self._cancelled.is_set() or self._countdown.is_over

    @property
    def time_left_s(self) -> float:
        """Seconds until its timeout; infinity where it has none."""
        left = self._countdown.left
        return math.inf if left is None else left

    @property
    def constraint(self) -> Constraint | None:
        """What rules it, where it stands."""
        return self._constraint

    @property
    def progress(self) -> Progress:
        """Where it stands."""
        self._progress.pending, self._progress.held = self._stream.pending, self._stream.held
        self._progress.forced = list(self._forced)
        self._progress.time_left_s = self._countdown.left
        return self._progress

    @property
    def expected(self) -> Sequence[int]:
        """The tokens that must follow, as far as the answer may still go and one more token is chosen after them."""
        if not self._forced:
            return ()
        n_left = self._progress.n_left
        return tuple(self._forced)[: None if n_left is None else n_left - 1]

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

    def start_timeout(self) -> None:
        """Let the seconds of its timeout run; again, and without a timeout, a no-op."""
        self._countdown.start()

    def start_prefill(self) -> None:
        """Note that its first step begins: the seconds until now were spent in a queue."""
        if self._progress.queue_s is None:
            self._progress.queue_s = time.perf_counter() - self._made_at

    def step(self, row: Row, seconds: float) -> Event:
        """Take the row of logits that follows the history, and choose a token.

        Args:
            row: float32 [V], or the largest of its logits.
            seconds: what computing the row took, for ``Answer.timings``.
        """
        n_before = len(self._progress.tokens)
        started = time.perf_counter()
        try:
            event = self._step(row)
        finally:
            self._note_seconds(seconds + time.perf_counter() - started, n_before)
        self._report(event)
        return event

    def end(self, reason: FinishReason) -> Event | None:
        """End the answer without a further token; returns an event where text was held back."""
        event = self._end(reason)
        self._report(event)
        return event

    def _end(self, reason: FinishReason) -> Event | None:
        self._timed_out = reason is FinishReason.CANCELLED and not self._cancelled.is_set()
        text = self._finish(reason, flush=True)
        return Event(None, text, math.nan) if text else None

    def _step(self, row: Row) -> Event:
        if isinstance(row, TopRow):
            assert self._top is not None, "nothing else asks for such a row"
            return self._taken(*self._top.choose(row), None)
        token = self._choose(row)
        logprob, logprobs = math.nan, None
        if self._shown or self._control.sees_events:
            logprob = log_probability(row, token)
            logprobs = logprobs_of(self._logprobs, row, token) if self._logprobs is not None else None
        return self._taken(token, logprob, logprobs)

    def _taken(self, token: int, logprob: float, logprobs: Logprobs | None) -> Event:
        ends = self._advance(token)
        self._history.take(token)
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

    def _finish(self, reason: FinishReason, *, flush: bool) -> str:
        """End the answer; returns text that was held back."""
        text, stopped = self._stream.flush() if flush else ("", False)
        self._history.settle()
        self._progress.text += text
        self._reason = FinishReason.STOP if stopped else reason
        return text

    def _report(self, event: Event | None) -> None:
        if event is not None and self._control.on_event is not None:
            self._control.on_event(event)

    def _note_seconds(self, seconds: float, n_before: int) -> None:
        """Add the seconds of a step before which the answer had ``n_before`` tokens."""
        progress = self._progress
        if n_before:
            progress.decode_s += seconds
            return
        progress.prefill_s += seconds
        if progress.tokens:
            progress.first_token_s = time.perf_counter() - self._made_at
