"""Several completions of one prompt: the prompt is decoded once, and the completions are decoded together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum, isnan
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from slm_core.closing import Closing
from slm_core.display import preview, signature
from slm_core.errors import InvalidOption, SessionError
from slm_core.generation.aio import in_thread
from slm_core.generation.branches import Branches
from slm_core.generation.control import callbacks
from slm_core.generation.events import Answer, Event
from slm_core.generation.loop import Generation
from slm_core.generation.stopping import StoppingCriterion
from slm_core.numerics import shown
from slm_core.types import PrefillProgress

MOST_COMPLETIONS = 4096
"""The largest number of completions of a call: they are all made before the first one is computed."""


@dataclass(frozen=True, slots=True)
class CompletionEvent:
    """One step of one completion.

    Attributes:
        index: the number of the completion, from 0.
        event: the step.
    """

    index: int
    event: Event


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """One of several answers to a prompt.

    Attributes:
        index: its number, from 0, which is also the number of its stream of random numbers.
        answer: the answer.
        mean_logprob: the mean of its tokens' log probabilities before sampling; 0.0 if it has no tokens.
    """

    index: int
    answer: Answer
    mean_logprob: float

    def __repr__(self) -> str:
        return signature(
            self,
            f"number {self.index}",
            preview(self.answer.text),
            self.answer.finish_reason,
            f"mean logprob {self.mean_logprob:.4g}",
        )


class Prefill(Protocol):
    """Decodes the prompt."""

    def __call__(
        self, cancelled: Callable[[], bool], *, progress: PrefillProgress | None
    ) -> NDArray[np.float32] | None:
        """The logits after the prompt, float32 [V]; None if ``cancelled`` returned True."""
        ...


class CompletionGroup:
    """Histories with a common prompt; the first request for a row decodes all of them.

    Args:
        branches: a sequence for each history.
        prefill: decodes the prompt when the first row is requested.
        n: the number of histories.
    """

    def __init__(self, branches: Branches, prefill: Prefill, n: int) -> None:
        self._branches = branches
        self._prefill = prefill
        self._pending: list[list[int]] = [[] for _ in range(n)]
        self._rows: dict[int, NDArray[np.float32]] = {}
        self._seq_ids: dict[int, int] = {}
        self._is_started = False

    def n_pending(self, i: int) -> int:
        """Tokens of a history that are not decoded yet."""
        return len(self._pending[i])

    def take(self, i: int, token: int) -> None:
        """Add a token to a history."""
        self._pending[i].append(token)
        self._rows.pop(i, None)

    def row(
        self, i: int, cancelled: Callable[[], bool], progress: PrefillProgress | None
    ) -> NDArray[np.float32] | None:
        """The logits after a history, float32 [V]; None if ``cancelled`` returned True."""
        if not self._is_started:
            row = self._prefill(cancelled, progress=progress)
            if row is None:
                return None
            self._begin(row)
        if i not in self._rows:
            self._decode()
        return self._rows[i]

    def leave(self, i: int) -> None:
        """Remove a history from the group."""
        self._rows.pop(i, None)
        if i in self._seq_ids:
            self._branches.drop(self._seq_ids.pop(i))

    def _begin(self, row: NDArray[np.float32]) -> None:
        for i in range(len(self._pending)):
            self._seq_ids[i] = self._branches.fork(self._branches.base.seq_id)
            self._rows[i] = row.copy()
        self._is_started = True

    def _decode(self) -> None:
        due = [i for i in self._seq_ids if self._pending[i]]
        rows = self._branches.decode([(self._seq_ids[i], self._pending[i]) for i in due])
        for i, row in zip(due, rows, strict=True):
            self._rows[i] = row
            self._pending[i] = []


class Branch:
    """One history of a group as a ``loop.TokenSource``.

    Args:
        group: the group.
        index: the number of the history.
        n_prompt: tokens of the prompt.
    """

    def __init__(self, group: CompletionGroup, index: int, n_prompt: int) -> None:
        self._group = group
        self._index = index
        self._n_tokens = n_prompt

    @property
    def n_tokens(self) -> int:
        """Tokens of the history."""
        return self._n_tokens

    @property
    def n_pending(self) -> int:
        """Tokens of the history that are not decoded yet."""
        return self._group.n_pending(self._index)

    def next_logits(
        self,
        cancelled: Callable[[], bool],
        *,
        expected: Sequence[int] = (),
        progress: PrefillProgress | None = None,
    ) -> NDArray[np.float32] | None:
        """The logits after the history, float32 [V]; ``expected`` is ignored, because the batch is shared."""
        return self._group.row(self._index, cancelled, progress)

    def take(self, token: int) -> None:
        """Add a token to the history."""
        self._n_tokens += 1
        self._group.take(self._index, token)

    def settle(self) -> None:
        """Nothing to do: no tokens are decoded ahead."""


class Completions(Closing, Iterator[CompletionEvent]):
    """Several running completions: iterate over their events, which alternate; then read ``answers``.

    Iterate with ``for`` or ``async for``; see ``aio.EventStream``. The time of a batch for all completions counts as
    time of the first completion.

    The sequences are released at the end of the iteration, and after an error. After an early exit, ``close`` or the
    end of a ``with`` block releases them.

    Args:
        generations: one for each completion, over branches of ``group``.
        group: the histories.
        n_best: the number of completions to keep, by the largest mean log probability; None keeps all, in order.
        close: releases the sequences.
        on_event: called with each event, before the iteration yields it.
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        group: CompletionGroup,
        n_best: int | None,
        close: Callable[[], None],
        on_event: Callable[[CompletionEvent], None] | None = None,
    ) -> None:
        self._generations = tuple(generations)
        self._group = group
        self._n_best = n_best
        self._close = close
        self._on_event = on_event
        self._closed = False
        self._turns: deque[int] = deque()
        self._logprobs: list[list[float]] = [[] for _ in generations]

    def __repr__(self) -> str:
        n_over = sum(generation.finished for generation in self._generations)
        return signature(self, f"{n_over} of {len(self._generations)} over", "paused" if self.paused else "")

    @property
    def over(self) -> bool:
        """Whether all answers are over."""
        return all(generation.finished for generation in self._generations)

    @property
    def paused(self) -> bool:
        """Whether a stopping criterion paused a completion, and no completion is running."""
        unfinished = [generation for generation in self._generations if not generation.finished]
        return bool(unfinished) and all(generation.paused for generation in unfinished)

    @property
    def answers(self) -> tuple[Completion, ...]:
        """All completions, in order; with ``n_best``, only the best, best first.

        Raises:
            SessionError: a completion is not over yet.
        """
        if not self.over:
            raise SessionError("there are no answers yet: iterate the completions to their end")
        completions = tuple(
            Completion(i, generation.answer, fsum(logprobs) / max(1, len(logprobs)))
            for i, (generation, logprobs) in enumerate(zip(self._generations, self._logprobs, strict=True))
        )
        if self._n_best is None:
            return completions
        return tuple(sorted(completions, key=lambda completion: -completion.mean_logprob)[: self._n_best])

    def run(self) -> tuple[Completion, ...]:
        """Iterate to the end; returns ``answers``."""
        for _ in self:
            pass
        return self.answers

    async def arun(self) -> tuple[Completion, ...]:
        """Like ``run``, on an event loop; see ``aio.EventStream``."""
        async for _ in self:
            pass
        return self.answers

    def cancel(self, index: int | None = None) -> None:
        """Cancel one completion, or all, as soon as possible. Any thread may call this."""
        for generation in self._generations if index is None else (self._generations[index],):
            generation.cancel()

    def resume(self, stopping_criteria: Sequence[StoppingCriterion] | None = None) -> Self:
        """Resume paused completions; None keeps the stopping criteria."""
        for generation in self._generations:
            if generation.paused:
                generation.resume(stopping_criteria)
        return self

    def close(self) -> None:
        """Release the sequences; unfinished completions are cancelled. A second call does nothing."""
        self._closed = True
        self.cancel()
        self._close()

    def __next__(self) -> CompletionEvent:
        try:
            event = self._next()
            if event is not None and self._on_event is not None:
                with callbacks:
                    self._on_event(event)
        except BaseException:
            self.close()
            raise
        if event is None:
            if self.over:
                self.close()
            raise StopIteration
        return event

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CompletionEvent:
        event = await in_thread(lambda: next(self, None), self.cancel)
        if event is None:
            raise StopAsyncIteration
        return event

    def _next(self) -> CompletionEvent | None:
        """The next event, round robin over the completions; None if all are over or paused."""
        while not self._closed:
            if not self._turns:
                self._turns.extend(i for i, g in enumerate(self._generations) if not g.finished and not g.paused)
            if not self._turns:
                return None
            i = self._turns.popleft()
            event = next(self._generations[i], None)
            if self._generations[i].finished:
                self._group.leave(i)
            if event is not None:
                if not isnan(event.logprob):
                    self._logprobs[i].append(event.logprob)
                return CompletionEvent(i, event)
        return None


def checked_completions(n: int, best_of: int | None) -> int:
    """The number of completions to make, of which ``n`` are kept.

    Raises:
        InvalidOption: ``n`` is below 1, ``best_of`` below ``n``, or one of them above ``MOST_COMPLETIONS``.
    """
    n_completions = n if best_of is None else best_of
    for name, value, least in (("n", n, 1), ("best_of", n_completions, n)):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_COMPLETIONS:
            raise InvalidOption(f"{name}={shown(value)} (accepted: an integer from {least} to {MOST_COMPLETIONS})")
    return n_completions
