"""What an engine hands out: the events of a request, or of several completions of one prompt."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import fsum, isnan
from typing import Generic, Self, TypeVar

from slm_core.closing import Closing
from slm_core.engine.metrics import RequestMetrics
from slm_core.engine.prompts import EncodedPrompt
from slm_core.engine.recorder import metrics_of
from slm_core.engine.requests import Request
from slm_core.errors import SessionError
from slm_core.generation.aio import EventStream
from slm_core.generation.completions import Completion, CompletionEvent
from slm_core.generation.events import Answer, Event

_E = TypeVar("_E")


class EventQueue(Generic[_E]):
    """Events from the engine's thread to readers on any thread or task. The writer never waits."""

    def __init__(self) -> None:
        self._events: deque[_E] = deque()
        self._changed = threading.Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether no event follows those that are there."""
        return self._ended

    def put(self, event: _E) -> None:
        """An event, for whoever reads."""
        with self._changed:
            self._events.append(event)
            self._notify()

    def end(self) -> None:
        """No further events follow."""
        with self._changed:
            self._ended = True
            self._notify()

    def get(self) -> _E | None:
        """The next event, waited for; None at the end."""
        with self._changed:
            while not self._events and not self._ended:
                self._changed.wait()
            return self._events.popleft() if self._events else None

    async def get_async(self, cancel: Callable[[], None]) -> _E | None:
        """The same on an event loop; ``cancel`` is called if the task is cancelled while it waits."""
        while True:
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

    def _notify(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # its event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_set_done, future)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class RequestStream(EventStream, Closing):
    """An answer that an engine makes: iterate for its events, with ``for`` or ``async for``; then ask for ``answer``.

    The engine never waits for the reader. Leaving a ``with`` block cancels the request; so does cancelling a task that
    waits for an event.

    Args:
        prompt: what is answered.
        wake: tells the engine that something changed.
    """

    def __init__(self, prompt: EncodedPrompt, wake: Callable[[], None]) -> None:
        self._prompt = prompt
        self._wake = wake
        self._queue: EventQueue[Event] = EventQueue()
        self._request: Request | None = None
        self._answer: Answer | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._followed.request_id

    @property
    def metrics(self) -> RequestMetrics:
        """How long the request waited and took, and what it cost; so far, where it is not over."""
        return self._followed.metrics or metrics_of(self._followed)

    @property
    def finished(self) -> bool:
        """Whether the answer is over, or the request failed."""
        return self._queue.ended

    @property
    def answer(self) -> Answer:
        """The whole answer; of messages, told apart by the chat format.

        Raises:
            SessionError: it is not over yet.
            SlmError: what the request failed with.
        """
        if self._answer is None:
            self._answer = self._prompt.read(self._followed.answer)
        return self._answer

    def saved(self, timeout: float | None = None) -> bool:
        """Wait until the history, answer included, is on disk (``cache_dir``); returns whether it is.

        False: there is no such directory, the answer is not over or was cancelled, the disk refused, or requests needed
        its room first.

        Raises:
            TimeoutError: it is still to be written after ``timeout`` seconds.
        """
        saved = self._followed.saved
        return saved is not None and saved.result(timeout)

    def cancel(self) -> None:
        """End the request as soon as possible, from any thread or task: after the running step nothing is computed."""
        self._followed.loop.cancel()
        self._wake()

    def close(self) -> None:
        """Cancel the request, if it is not over."""
        if not self.finished:
            self.cancel()

    def show_events(self, shown: bool) -> None:
        """Whether events go to anybody, from now on."""
        self._followed.loop.show_events(shown)

    def __next__(self) -> Event:
        return self._checked(self._queue.get(), StopIteration)

    async def __anext__(self) -> Event:
        return self._checked(await self._queue.get_async(self.cancel), StopAsyncIteration)

    def _checked(self, event: Event | None, end: type[Exception]) -> Event:
        if event is not None:
            return event
        if self._followed.error is not None:
            raise self._followed.error
        raise end

    @property
    def _followed(self) -> Request:
        assert self._request is not None, "the engine gives it at once"
        return self._request

    # What the engine calls.

    def follows(self, request: Request) -> None:
        """The request whose events these are."""
        self._request = request

    def put(self, event: Event) -> None:
        """An event of the request."""
        self._queue.put(event)

    def end(self) -> None:
        """The request is over."""
        self._queue.end()


class CompletionsStream(Iterator[CompletionEvent], Closing):
    """Several completions of one prompt: iterate for their events as they come, then ask for ``answers``.

    Leaving a ``with`` block cancels them; so does cancelling a task that waits for an event.

    Args:
        prompt: what is answered.
        n_made: completions that are made.
        n_best: completions to keep, those with the largest mean log probability; None keeps all, in order.
        wake: tells the engine that something changed.
    """

    def __init__(self, prompt: EncodedPrompt, n_made: int, n_best: int | None, wake: Callable[[], None]) -> None:
        self._prompt = prompt
        self._n_best = n_best
        self._wake = wake
        self._queue: EventQueue[CompletionEvent] = EventQueue()
        self._requests: Sequence[Request] = ()
        self._logprobs: list[list[float]] = [[] for _ in range(n_made)]
        self._n_running = n_made

    @property
    def metrics(self) -> tuple[RequestMetrics, ...]:
        """How long each completion waited and took, and what it cost; so far, where it is not over."""
        return tuple(request.metrics or metrics_of(request) for request in self._requests)

    @property
    def finished(self) -> bool:
        """Whether all are over, or failed."""
        return self._queue.ended

    @property
    def answers(self) -> tuple[Completion, ...]:
        """The completions, in order; where only the best are wanted, those, best first.

        Raises:
            SessionError: they are not over yet.
            SlmError: what one of them failed with.
        """
        if not self.finished:
            raise SessionError("there are no answers yet: iterate the completions to their end")
        made = [
            Completion(i, self._prompt.read(request.answer), fsum(logprobs) / max(1, len(logprobs)))
            for i, (request, logprobs) in enumerate(zip(self._requests, self._logprobs, strict=True))
        ]
        if self._n_best is None:
            return tuple(made)
        return tuple(sorted(made, key=lambda completion: -completion.mean_logprob)[: self._n_best])

    def run(self) -> tuple[Completion, ...]:
        """Iterate to the end; returns ``answers``."""
        for _ in self:
            pass
        return self.answers

    async def arun(self) -> tuple[Completion, ...]:
        """The same for a program on an event loop."""
        async for _ in self:
            pass
        return self.answers

    def cancel(self, index: int | None = None) -> None:
        """End one, or all, as soon as possible, from any thread or task."""
        for request in self._requests if index is None else (self._requests[index],):
            request.loop.cancel()
        self._wake()

    def close(self) -> None:
        """Cancel those that are not over."""
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
            return event
        for request in self._requests:
            if request.error is not None:
                raise request.error
        raise end

    # What the engine calls.

    def follows(self, requests: Sequence[Request]) -> None:
        """The requests whose events these are."""
        self._requests = requests

    def put(self, index: int, event: Event) -> None:
        """An event of one of them."""
        if not isnan(event.logprob):
            self._logprobs[index].append(event.logprob)
        self._queue.put(CompletionEvent(index, event))

    def end_one(self) -> None:
        """One of them is over."""
        self._n_running -= 1
        if not self._n_running:
            self._queue.end()
