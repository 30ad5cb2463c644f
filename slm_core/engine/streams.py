"""Streams of events that an engine returns: of a request, or of several completions of one prompt."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import fsum, isnan
from typing import Generic, Self, TypeVar

from slm_core.closing import Closing
from slm_core.display import count, signature
from slm_core.engine.metrics import RequestMetrics
from slm_core.engine.notifications import WAKEUPS, Notifications, Waiter
from slm_core.engine.prompts import EncodedPrompt, EventParser
from slm_core.engine.recorder import metrics_of
from slm_core.engine.requests import Request
from slm_core.errors import SessionError
from slm_core.generation.aio import EventStream
from slm_core.generation.completions import Completion, CompletionEvent
from slm_core.generation.events import Answer, Event, SpeculationStats
from slm_core.interrupts import wait_s

_E = TypeVar("_E")


class EventQueue(Generic[_E]):
    """A queue of events from the engine's thread to readers on any thread or task. The writer never waits.

    Args:
        notifications: decides when readers learn of events.
    """

    def __init__(self, notifications: Notifications) -> None:
        self._notifications = notifications
        self._events: deque[_E] = deque()
        self._changed = threading.Condition()
        self._waiters: list[Waiter] = []
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether no more events will be added."""
        return self._ended

    def put(self, event: _E) -> None:
        """Add an event."""
        with self._changed:
            self._events.append(event)
        self._notifications.add(self)

    def end(self) -> None:
        """End the queue: no event follows."""
        with self._changed:
            self._ended = True
        self._notifications.add(self)

    def get(self) -> _E | None:
        """Wait for the next event; None at the end.

        Raises:
            SessionError: this is the engine's thread, and there is no event yet.
            EngineClosed: the engine is of the process that forked this one.
        """
        self._notifications.check_process()  # first: the engine's thread may have held the lock at the fork
        with self._changed:
            while not self._events and not self._ended:
                self._notifications.check_wait("another answer of the engine")
                self._changed.wait(wait_s())
            return self._events.popleft() if self._events else None

    def check_wait(self, what: str) -> None:
        """See ``Notifications.check_wait``."""
        self._notifications.check_wait(what)

    async def get_async(self, cancel: Callable[[], None]) -> _E | None:
        """Like ``get``, on an event loop; ``cancel`` is called if the task is cancelled while it waits."""
        while True:
            self._notifications.check_process()
            with self._changed:
                if self._events:
                    return self._events.popleft()
                if self._ended:
                    return None
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, future))
            try:
                await future
            except asyncio.CancelledError:
                cancel()
                raise

    def notify(self) -> None:
        """Wake the readers."""
        with self._changed:
            self._changed.notify_all()
            waiters, self._waiters = self._waiters, []
        WAKEUPS.wake(waiters)


class CompletionsQueue(EventQueue[CompletionEvent]):
    """A queue of the events of several completions, which also records their log probabilities.

    Args:
        n: the number of completions.
        notifications: decides when readers learn of events.
    """

    def __init__(self, n: int, notifications: Notifications) -> None:
        super().__init__(notifications)
        self._logprobs: list[list[float]] = [[] for _ in range(n)]
        self._n_running = n

    def put_one(self, index: int, event: Event) -> None:
        """Add an event of a completion."""
        if not isnan(event.logprob):
            self._logprobs[index].append(event.logprob)
        self.put(CompletionEvent(index, event))

    def end_one(self) -> None:
        """Record that a completion is over."""
        self._n_running -= 1
        if not self._n_running:
            self.end()

    def mean_logprob(self, index: int) -> float:
        """The mean log probability of the tokens of a completion."""
        logprobs = self._logprobs[index]
        return fsum(logprobs) / max(1, len(logprobs))


class RequestStream(EventStream, Closing):
    """The stream of a request: iterate over its events with ``for`` or ``async for``, then read ``answer``.

    For messages, the chat format separates the text of the events into content, reasoning and tool calls.

    The engine never waits for the reader. Leaving a ``with`` block cancels the request; so does cancelling a task that
    waits for an event.

    Args:
        prompt: the prompt of the request.
        request: the request. It refers to the queue, not to the stream: without a cycle of references, its memory is
            free as soon as nobody refers to the stream.
        queue: the queue of its events.
        wake: wakes the engine's thread.
    """

    def __init__(
        self, prompt: EncodedPrompt, request: Request, queue: EventQueue[Event], wake: Callable[[], None]
    ) -> None:
        self._prompt = prompt
        self._request = request
        self._queue = queue
        self._wake = wake
        self._parser = EventParser(prompt.parser())
        self._answer: Answer | None = None

    def __repr__(self) -> str:
        state = "over" if self.finished else "running"
        return signature(self, self.request_id, state, count(self.metrics.completion_tokens, "token"))

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._request.request_id

    @property
    def metrics(self) -> RequestMetrics:
        """Times and tokens of the request; so far, if it is not over."""
        return self._request.metrics or metrics_of(self._request)

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, or the request failed."""
        return self._queue.ended

    @property
    def answer(self) -> Answer:
        """The whole answer. For messages, the chat format separates content, reasoning and tool calls.

        Raises:
            SessionError: the answer is not over yet.
            SlmError: the request failed.
        """
        if self._answer is None:
            self._answer = self._prompt.read(self._request.answer)
        return self._answer

    def saved(self, timeout: float | None = None) -> bool:
        """Wait until the history, including the answer, is on disk (``cache_dir``); returns whether it is.

        False: there is no ``cache_dir``, the answer is not over or was cancelled, writing failed, or the sequence was
        dropped for other requests first.

        Raises:
            TimeoutError: it is not written after ``timeout`` seconds.
            SessionError: a callback of a request calls it before it is written.
        """
        saved = self._request.saved
        if saved is not None and not saved.done():
            self._queue.check_wait("the disk")
        return saved is not None and saved.result(timeout)

    def cancel(self) -> None:
        """Cancel the request after the running step. Any thread or task may call this."""
        self._request.loop.cancel()
        self._wake()

    def close(self) -> None:
        """Cancel the request, if it is not over."""
        if not self.finished:
            self.cancel()

    def show_events(self, shown: bool) -> None:
        """Turn events on or off from now on."""
        self._request.loop.show_events(shown)

    def __next__(self) -> Event:
        return self._checked(self._queue.get(), StopIteration)

    async def __anext__(self) -> Event:
        return self._checked(await self._queue.get_async(self.cancel), StopAsyncIteration)

    def _checked(self, event: Event | None, end: type[Exception]) -> Event:
        if event is not None:
            return self._parser.read(event)
        if self._request.error is not None:
            raise self._request.error
        rest = self._parser.end()
        if rest is None:
            raise end
        return rest


class CompletionsStream(Iterator[CompletionEvent], Closing):
    """The stream of several completions of one prompt: iterate over their events, then read ``answers``.

    Leaving a ``with`` block cancels all completions; so does cancelling a task that waits for an event.

    Args:
        prompt: the prompt of the completions.
        requests: one request for each completion to make; they refer to the queue, not to the stream.
        queue: the queue of their events.
        n_best: the number of completions to keep, by the largest mean log probability; None keeps all, in order.
        wake: wakes the engine's thread.
    """

    def __init__(
        self,
        prompt: EncodedPrompt,
        requests: Sequence[Request],
        queue: CompletionsQueue,
        n_best: int | None,
        wake: Callable[[], None],
    ) -> None:
        self._prompt = prompt
        self._requests = requests
        self._queue = queue
        self._n_best = n_best
        self._wake = wake
        self._parsers = [EventParser(prompt.parser()) for _ in requests]

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self._prompt.tokens)

    def __repr__(self) -> str:
        state = "over" if self.finished else "running"
        return signature(self, count(len(self._requests), "completion"), state)

    @property
    def metrics(self) -> tuple[RequestMetrics, ...]:
        """Times and tokens of each completion; so far, if it is not over."""
        return tuple(request.metrics or metrics_of(request) for request in self._requests)

    @property
    def drafts(self) -> tuple[SpeculationStats, ...]:
        """The drafts of each completion, so far; of none without speculation."""
        return tuple(request.drafts.stats for request in self._requests if request.drafts is not None)

    @property
    def finished(self) -> bool:
        """Whether all completions are complete or failed."""
        return self._queue.ended

    @property
    def answers(self) -> tuple[Completion, ...]:
        """All completions, in order; with ``best_of``, only the best, best first.

        Raises:
            SessionError: a completion is not over yet.
            SlmError: a completion failed.
        """
        if not self.finished:
            raise SessionError("there are no answers yet: iterate the completions to their end")
        completions = [
            Completion(i, self._prompt.read(request.answer), self._queue.mean_logprob(i))
            for i, request in enumerate(self._requests)
        ]
        if self._n_best is None:
            return tuple(completions)
        return tuple(sorted(completions, key=lambda completion: -completion.mean_logprob)[: self._n_best])

    def run(self) -> tuple[Completion, ...]:
        """Iterate to the end; returns ``answers``."""
        for _ in self:
            pass
        return self.answers

    async def arun(self) -> tuple[Completion, ...]:
        """Like ``run``, on an event loop."""
        async for _ in self:
            pass
        return self.answers

    def cancel(self, index: int | None = None) -> None:
        """Cancel one completion, or all, after the running step. Any thread or task may call this."""
        for request in self._requests if index is None else (self._requests[index],):
            request.loop.cancel()
        self._wake()

    def close(self) -> None:
        """Cancel the completions that are not over."""
        if not self.finished:
            self.cancel()

    def __next__(self) -> CompletionEvent:
        return self._checked(self._queue.get(), StopIteration)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CompletionEvent:
        return self._checked(await self._queue.get_async(self.cancel), StopAsyncIteration)

    def _checked(self, event: CompletionEvent | None, end: type[Exception]) -> CompletionEvent:
        if event is not None:
            return CompletionEvent(event.index, self._parsers[event.index].read(event.event))
        for request in self._requests:
            if request.error is not None:
                raise request.error
        for i, parser in enumerate(self._parsers):
            if (rest := parser.end()) is not None:
                return CompletionEvent(i, rest)
        raise end
