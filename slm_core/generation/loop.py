"""The generation loop: decode, choose, show, ask the brakes; over anything that has a next row of logits."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import ContextFull, SessionError
from slm_core.generation.brakes import Brake, BrakeAction, Draft, ask
from slm_core.generation.events import Answer, Event, FinishReason, Timings, Usage
from slm_core.generation.text import TextStream
from slm_core.protocols import Constraint, FastForward, Sampler, Stop, Vocab

_BRAKE_ENDS = {BrakeAction.FINISH: FinishReason.STOP, BrakeAction.STOP: FinishReason.CANCELLED}


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

    def next_logits(self, cancelled: Callable[[], bool]) -> NDArray[np.float32] | None:
        """Decode what is pending, then the logits that follow it, float32 [V]; None where ``cancelled`` came true."""
        ...

    def take(self, token: int) -> None:
        """Add a token to the history."""
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
        prefill_s: seconds until the first token could be chosen.
        decode_s: seconds since.
    """

    n_prompt: int
    n_cached: int
    max_tokens: int | None
    stops: tuple[str, ...]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    pending: bytes = b""
    held: str = ""
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Generation(Iterator[Event]):
    """An answer in the making: iterate for its events, then ask for ``answer``.

    Args:
        source: the history it extends.
        vocab: for the bytes of tokens.
        sampler: chooses them; it is told what is taken.
        progress: where it stands; a fresh one, or that of a paused generation.
        brakes: asked in order after each token.
        constraint: what may be said.
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
        brakes: Sequence[Brake] = (),
        constraint: Constraint | None = None,
        special: bool = False,
        paused: bool = False,
    ) -> None:
        self._source = source
        self._vocab = vocab
        self.sampler = sampler
        self._brakes = tuple(brakes)
        self._constraint = constraint
        self.special = special
        self._forced: list[int] = []
        self._cancelled = threading.Event()
        self._stream = TextStream(progress.stops, progress.pending, progress.held)
        self._progress = progress
        self._reason: FinishReason | None = None
        self.paused = paused

    @property
    def finished(self) -> bool:
        """Whether the answer is over."""
        return self._reason is not None

    @property
    def constrained(self) -> bool:
        """Whether a constraint rules it."""
        return self._constraint is not None

    @property
    def progress(self) -> Progress:
        """Where it stands."""
        self._progress.pending, self._progress.held = self._stream.pending, self._stream.held
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
        usage = Usage(p.n_prompt, p.n_cached, len(p.tokens))
        return Answer(p.text, self._reason, tuple(p.tokens), usage, Timings(p.prefill_s, p.decode_s))

    def cancel(self) -> None:
        """End it as soon as possible, from any thread; in prefill, within one batch."""
        self._cancelled.set()

    def run(self) -> Answer:
        """Iterate to the end; returns the answer."""
        for _ in self:
            pass
        return self.answer

    def resume(self, brakes: Sequence[Brake] | None) -> Self:
        """Go on after a pause, with the same brakes unless others are given."""
        self.paused = False
        if brakes is not None:
            self._brakes = tuple(brakes)
        return self

    def __next__(self) -> Event:
        if self._reason is not None or self.paused:
            raise StopIteration
        if self._progress.max_tokens is not None and len(self._progress.tokens) >= self._progress.max_tokens:
            return self._end_without_token(FinishReason.LENGTH)
        started = time.perf_counter()
        try:
            logits = self._next_logits()
        finally:
            self._clock(started)
        if logits is None:
            return self._end_without_token(FinishReason.CANCELLED)
        if logits.size == 0:
            return self._end_without_token(FinishReason.LENGTH)
        return self._step(logits)

    def _next_logits(self) -> NDArray[np.float32] | None:
        """The next row; None where cancelled, an empty row where the context is full in mid-answer."""
        if self._cancelled.is_set():
            return None
        try:
            return self._source.next_logits(self._cancelled.is_set)
        except ContextFull:
            if not self._progress.tokens:
                raise
            return np.empty(0, np.float32)

    def _step(self, logits: NDArray[np.float32]) -> Event:
        token = self._choose(logits)
        event = Event(token, "", log_probability(logits, token))
        self._source.take(token)
        self.sampler.accept(token)
        self._progress.tokens.append(token)
        ends = self._advance(token)
        data = b"" if token in self._vocab.eog_ids else self._vocab.token_bytes(token, special=self.special)
        text, stopped = self._stream.feed(data)
        ends = FinishReason.STOP if stopped else ends
        return self._close_step(event, text, ends, stopped=stopped)

    def _close_step(self, event: Event, text: str, ends: FinishReason | None, *, stopped: bool) -> Event:
        """Ask the brakes about a token, end where it is time, and complete its event."""
        progress = self._progress
        progress.text += text
        action = ask(self._brakes, Event(event.token, text, event.logprob), Draft(progress.tokens, progress.text))
        ends = ends or _BRAKE_ENDS.get(action)
        if ends is None and progress.max_tokens is not None and len(progress.tokens) >= progress.max_tokens:
            ends = FinishReason.LENGTH
        if ends is None:
            self.paused = action is BrakeAction.PAUSE
        else:
            text += self._finish(ends, flush=not stopped)
        return Event(event.token, text, event.logprob)

    def _choose(self, logits: NDArray[np.float32]) -> int:
        if self._forced:
            return self._forced.pop(0)
        if self._constraint is not None:
            logits = self._constraint.mask(logits)
        return self.sampler.sample(logits)

    def _advance(self, token: int) -> FinishReason | None:
        """Move the constraint on; returns why the answer ends with this token, if it does."""
        if token in self._vocab.eog_ids:
            return FinishReason.STOP
        if self._constraint is None:
            return None
        moved = self._constraint.advance(token)
        if isinstance(moved, FastForward):
            self._forced.extend(moved.tokens)
        return FinishReason.CONSTRAINT if isinstance(moved, Stop) else None

    def _end_without_token(self, reason: FinishReason) -> Event:
        text = self._finish(reason, flush=True)
        if not text:
            raise StopIteration
        return Event(None, text, math.nan)

    def _finish(self, reason: FinishReason, *, flush: bool) -> str:
        """End the answer; returns text that was held back."""
        text, stopped = self._stream.flush() if flush else ("", False)
        self._progress.text += text
        self._reason = FinishReason.STOP if stopped else reason
        return text

    def _clock(self, started: float) -> None:
        elapsed = time.perf_counter() - started
        if self._progress.tokens:
            self._progress.decode_s += elapsed
        else:
            self._progress.prefill_s += elapsed


def log_probability(logits: NDArray[np.float32], token: int) -> float:
    """Natural logarithm of a token's probability under one row of logits, float32 [V]."""
    best = logits.max()
    return float(logits[token] - best - np.log(np.exp(logits - best).sum(dtype=np.float64)))
