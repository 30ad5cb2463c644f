"""The token loop: choose a token from a row of logits, convert it to text, call the stopping criteria.

The caller computes the rows: ``loop.Generation`` for one history, ``slm_core.engine`` for many.
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
from slm_core.generation.control import Control, Countdown, callbacks
from slm_core.generation.events import Answer, Event, FinishReason, Logprobs, Timings, TokenLogprob, Usage
from slm_core.generation.logprobs import logprobs_of, wanted_logprobs
from slm_core.generation.stopping import Draft, StoppingAction, ask
from slm_core.generation.text import TextStream
from slm_core.generation.top import Row, TopChoice, TopRow
from slm_core.numerics import log_probability
from slm_core.protocols import Constraint, FastForward, Sampler, Stop, Vocab

if TYPE_CHECKING:
    from slm_core.generation.shifting import ShiftingSource
    from slm_core.generation.speculation.rounds import DraftRounds

_ENDS_OF_ACTIONS = {StoppingAction.FINISH: FinishReason.STOP, StoppingAction.STOP: FinishReason.CANCELLED}


class TokenHistory(Protocol):
    """The tokens that an answer extends."""

    def take(self, token: int) -> None:
        """Add a token to the history."""
        ...

    def settle(self) -> None:
        """Forget tokens that were decoded ahead of the history."""
        ...


@dataclass(slots=True)
class Progress:
    """The state of a generation that pauses and dumps keep.

    Attributes:
        n_prompt: tokens before the answer.
        n_cached: prompt tokens that were cached.
        max_tokens: the longest answer; None for no limit.
        stops: texts that end the answer.
        tokens: the tokens of the answer so far.
        text: the text of the answer so far.
        pending: bytes of an incomplete character.
        held: held-back text that may become a stop text.
        forced: next tokens that the constraint forces.
        queue_s: seconds before the first step; None before it.
        prefill_s: seconds of the first step.
        decode_s: seconds of the other steps.
        first_token_s: seconds from the start to the first token; None before it.
        time_left_s: seconds until the timeout, not counting pauses; None for no timeout.
        n_shifted: cached tokens whose keys and values depend on tokens that were cut later.
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
    n_shifted: int = 0

    @property
    def n_left(self) -> int | None:
        """Tokens left until ``max_tokens``; None for no limit."""
        return None if self.max_tokens is None else self.max_tokens - len(self.tokens)


class TokenLoop:
    """A running answer, one row of logits per step: call ``step`` with each row, or ``end`` without a row.

    Args:
        history: the tokens that the answer extends.
        vocab: decodes tokens to bytes.
        sampler: chooses tokens, and accepts each token of the answer.
        progress: the state: new, or of a paused generation.
        control: the caller's callbacks.
        constraint: restricts the answer; None for no constraint.
        speculation: its drafts; None without speculation.
        shifting: the source, if it may drop tokens of the history.
        top: chooses a token from the largest logits; None if steps always get full rows.
        special: whether control tokens other than EOG become text.

    Attributes:
        paused: whether a stopping criterion paused the answer.
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
        speculation: DraftRounds | None = None,
        shifting: ShiftingSource | None = None,
        top: TopChoice | None = None,
        special: bool = False,
    ) -> None:
        self._history = history
        self._vocab = vocab
        self.sampler = sampler
        self._logprobs = wanted_logprobs(sampler)
        self._token_logprobs: list[TokenLogprob] = []
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
        self._created_at = time.perf_counter()
        self._reason: FinishReason | None = None
        self._shown = True
        self.paused = False

    @property
    def finished(self) -> bool:
        """Whether the answer is over."""
        return self._reason is not None

    @property
    def interrupted(self) -> bool:
        """Whether it was cancelled, or reached its timeout; then call ``end`` with CANCELLED."""
        return self._cancelled.is_set() or self._countdown.is_over

    @property
    def time_left_s(self) -> float:
        """Seconds until the timeout; infinity without a timeout."""
        left = self._countdown.left
        return math.inf if left is None else left

    @property
    def constraint(self) -> Constraint | None:
        """The constraint in its present state."""
        return self._constraint

    @property
    def progress(self) -> Progress:
        """The present state."""
        self._progress.pending, self._progress.held = self._stream.pending, self._stream.held
        self._progress.forced = list(self._forced)
        self._progress.time_left_s = self._countdown.left
        return self._progress

    @property
    def expected(self) -> Sequence[int]:
        """The forced next tokens, limited so that at least one more token can follow within ``max_tokens``."""
        if not self._forced:
            return ()
        n_left = self._progress.n_left
        return tuple(self._forced)[: None if n_left is None else n_left - 1]

    @property
    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            SessionError: the answer is not over yet.
        """
        if self._reason is None:
            state = "paused: call generate() to go on" if self.paused else "not over: iterate it to its end"
            raise SessionError(f"there is no answer yet, the generation is {state}")
        p = self._progress
        return Answer(
            p.text,
            self._reason,
            tuple(p.tokens),
            Usage(p.n_prompt, p.n_cached, len(p.tokens), p.n_shifted),
            Timings(p.prefill_s, p.decode_s, p.queue_s or 0.0, p.first_token_s),
            timed_out=self._timed_out,
            speculation=None if self.speculation is None else self.speculation.stats,
            overflowed=None if self.shifting is None else self.shifting.overflowed,
            logprobs=self._answer_logprobs(),
            stop=self._stream.stop,
        )

    def _answer_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        is_whole = len(self._token_logprobs) == len(self._progress.tokens)  # not after a restore
        return tuple(self._token_logprobs) if self._logprobs is not None and is_whole else None

    def cancel(self) -> None:
        """Cancel the answer as soon as possible, in prefill within one batch. Any thread or task may call this."""
        self._cancelled.set()

    def show_events(self, shown: bool) -> None:
        """Turn events on or off from now on."""
        self._shown = shown

    def start_timeout(self) -> None:
        """Start the timeout, if there is one and it is not running."""
        self._countdown.start()

    def start_prefill(self) -> None:
        """Record the start of the first step: the time until now was spent in a queue."""
        if self._progress.queue_s is None:
            self._progress.queue_s = time.perf_counter() - self._created_at

    def step(self, row: Row, seconds: float) -> Event:
        """Choose a token from the row of logits after the history.

        Args:
            row: float32 [V], or its largest logits.
            seconds: the time to compute the row, for ``Answer.timings``.
        """
        n_before = len(self._progress.tokens)
        started = time.perf_counter()
        try:
            with callbacks:
                event = self._step(row)
        finally:
            self._note_seconds(seconds + time.perf_counter() - started, n_before)
        self._report(event)
        return event

    def end(self, reason: FinishReason) -> Event | None:
        """End the answer without another token; returns an event if text was held back."""
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
            return self._accept(*self._top.choose(row), None)
        token = self._choose(row)
        logprob, logprobs = math.nan, None
        if self._shown or self._control.sees_events or self._logprobs is not None:
            logprob = log_probability(row, token)
            logprobs = logprobs_of(self._logprobs, row, token) if self._logprobs is not None else None
        return self._accept(token, logprob, logprobs)

    def _accept(self, token: int, logprob: float, logprobs: Logprobs | None) -> Event:
        ends = self._advance(token)
        self._history.take(token)
        self.sampler.accept(token)
        if logprobs is not None:
            top = tuple((each, self._text_of(each), value) for each, value in logprobs.model)
            self._token_logprobs.append(TokenLogprob(token, self._text_of(token), logprob, top))
        self._progress.tokens.append(token)
        data = b"" if token in self._vocab.eog_ids else self._vocab.token_bytes(token, special=self.special)
        text, stopped = self._stream.feed(data)
        self._progress.text += text
        ends = FinishReason.STOP if stopped else ends
        return self._close_step(Event(token, text, logprob, logprobs=logprobs), ends, stopped=stopped)

    def _text_of(self, token: int) -> str:
        return self._vocab.token_bytes(token, special=True).decode("utf-8", "replace")

    def _close_step(self, event: Event, ends: FinishReason | None, *, stopped: bool) -> Event:
        """Call the stopping criteria, end the answer if necessary, and complete the event of the token."""
        progress, action = self._progress, StoppingAction.NEXT
        if self._control.stopping_criteria:
            try:
                action = ask(self._control.stopping_criteria, event, Draft(progress.tokens, progress.text))
            except BaseException:
                if ends is not None:  # the token ended the answer, despite the error
                    self._finish(ends, flush=not stopped)
                raise
            ends = ends or _ENDS_OF_ACTIONS.get(action)
        if ends is None and progress.max_tokens is not None and len(progress.tokens) >= progress.max_tokens:
            ends = FinishReason.LENGTH
        if ends is not None:
            held_text = self._finish(ends, flush=not stopped)
            return replace(event, text=event.text + held_text) if held_text else event
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
        """Advance the constraint; returns the finish reason if the answer ends with this token."""
        ends = FinishReason.STOP if token in self._vocab.eog_ids else None
        if self._constraint is None:
            return ends
        outcome = self._constraint.advance(token)
        if ends is not None:
            return ends
        if isinstance(outcome, FastForward):
            self._forced = deque(outcome.tokens)
        return FinishReason.CONSTRAINT if isinstance(outcome, Stop) else None

    def _finish(self, reason: FinishReason, *, flush: bool) -> str:
        """End the answer; returns held-back text."""
        text, stopped = self._stream.flush() if flush else ("", False)
        self._history.settle()
        self._progress.text += text
        self._reason = FinishReason.STOP if stopped else reason
        return text

    def _report(self, event: Event | None) -> None:
        if event is not None and self._control.on_event is not None:
            self._control.on_event(event)

    def _note_seconds(self, seconds: float, n_before: int) -> None:
        """Add the seconds of a step; the answer had ``n_before`` tokens before it."""
        progress = self._progress
        if n_before:
            progress.decode_s += seconds
            return
        progress.prefill_s += seconds
        if progress.tokens:
            progress.first_token_s = time.perf_counter() - self._created_at
