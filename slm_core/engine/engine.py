"""The engine: requests of many threads and tasks, answered together by a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict, Unpack

from slm_core.chat.answers import own_constraint
from slm_core.closing import Closing
from slm_core.constraints import Spec
from slm_core.engine.core import EngineCore, EngineOptions
from slm_core.engine.prompts import EncodedPrompt, Prompt, encode
from slm_core.engine.requests import Request
from slm_core.errors import EngineClosed
from slm_core.generation.aio import EventStream
from slm_core.generation.control import checked_timeout
from slm_core.generation.events import Answer, Event
from slm_core.generation.stopping import StoppingCriterion
from slm_core.protocols import Constraint, Context, Formatter, Vocab
from slm_core.sampling import Sampling


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine does, and has done since it was made.

    Attributes:
        n_active: requests that are computed now.
        n_waiting: requests that wait for a sequence, or for room.
        n_requests: requests so far.
        n_finished: of those, answered.
        n_cancelled: cancelled, or out of time.
        n_failed: failed.
        n_preempted: times that a request gave up its sequence to others.
        n_swapped: of those, times that it was dumped in place of being computed again.
        n_steps: batches decoded.
        prompt_tokens: tokens of all prompts.
        cached_tokens: of those, tokens that did not have to be computed.
        completion_tokens: tokens of all answers.
        computed_tokens: tokens decoded, those computed again included.
        n_ctx: positions of the context.
        n_free: of those, free ones.
        n_cached_sequences: sequences kept for prompts that begin alike.
    """

    n_active: int
    n_waiting: int
    n_requests: int
    n_finished: int
    n_cancelled: int
    n_failed: int
    n_preempted: int
    n_swapped: int
    n_steps: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    computed_tokens: int
    n_ctx: int
    n_free: int
    n_cached_sequences: int


class RequestOptions(TypedDict, total=False):
    """Options of ``Engine.generate``: those of ``Engine.submit``."""

    constraint: Constraint | Spec | None
    stopping_criteria: Sequence[StoppingCriterion]
    thinking: bool | None
    special: bool
    timeout: float | None
    priority: float
    key: str
    salt: str


class RequestStream(EventStream, Closing):
    """An answer that an engine makes: iterate for its events, with ``for`` or ``async for``; then ask for ``answer``.

    The engine never waits for the reader. Leaving a ``with`` block cancels the request; so does cancelling a task that
    waits for an event.

    Args:
        wake: tells the engine that something changed.
    """

    def __init__(self, prompt: EncodedPrompt, wake: Callable[[], None]) -> None:
        self._prompt = prompt
        self._wake = wake
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._request: Request | None = None
        self._answer: Answer | None = None
        self._over = False

    @property
    def finished(self) -> bool:
        """Whether the answer is over, or the request failed."""
        return self._over

    @property
    def answer(self) -> Answer:
        """The whole answer; of messages, told apart by the chat format.

        Raises:
            SessionError: it is not over yet.
            SlmError: what the request failed with.
        """
        if self._answer is None:
            assert self._request is not None, "the engine gives it at once"
            self._answer = self._prompt.read(self._request.answer)
        return self._answer

    def cancel(self) -> None:
        """End the request as soon as possible, from any thread or task: after the running step nothing is computed."""
        if self._request is not None:
            self._request.loop.cancel()
            self._wake()

    def close(self) -> None:
        """Cancel the request, if it is not over."""
        if not self._over:
            self.cancel()

    def show_events(self, shown: bool) -> None:
        """Whether events go to anybody, from now on."""
        assert self._request is not None, "the engine gives it at once"
        self._request.loop.show_events(shown)

    def __next__(self) -> Event:
        with self._changed:
            while not self._events and not self._over:
                self._changed.wait()
            return self._next_event(StopIteration)

    async def __anext__(self) -> Event:
        while True:
            with self._changed:
                if self._events or self._over:
                    return self._next_event(StopAsyncIteration)
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, future))
            try:
                await future
            except asyncio.CancelledError:
                self.cancel()
                raise

    def _next_event(self, end: type[Exception]) -> Event:
        if self._events:
            return self._events.popleft()
        if self._request is not None and self._request.error is not None:
            raise self._request.error
        raise end

    # What the engine calls.

    def follows(self, request: Request) -> None:
        """The request whose events these are."""
        self._request = request

    def put(self, event: Event) -> None:
        """An event, for whoever reads."""
        with self._changed:
            self._events.append(event)
            self._notify()

    def end(self) -> None:
        """No further events follow."""
        with self._changed:
            self._over = True
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # its event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_set_done, future)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Engine(Closing):
    """Answers requests of any number of threads and tasks over one context; what ``LoadedModel.engine`` returns.

    Args:
        context: the KV cache; closed with the engine.
        vocab: the model's vocabulary.
        formatter: gives the model's chat format, or raises why there is none.
        options: how requests share the context.
    """

    def __init__(
        self, context: Context, vocab: Vocab, formatter: Callable[[], Formatter], options: EngineOptions
    ) -> None:
        self._core = EngineCore(context, options)
        self._vocab = vocab
        self._formatter = formatter
        self._inbox: deque[Request] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="slm-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        constraint: Constraint | Spec | None = None,
        stopping_criteria: Sequence[StoppingCriterion] = (),
        thinking: bool | None = None,
        special: bool = False,
        timeout: float | None = None,
        priority: float = 0,
        key: str = "",
        salt: str = "",
    ) -> RequestStream:
        """Ask for an answer; returns at once. From any thread.

        Args:
            prompt: a text to continue, its tokens, or messages.
            sampling: how tokens are chosen.
            constraint: what may be said.
            stopping_criteria: asked in order after each token, in the engine's thread; PAUSE fails the request.
            thinking: ask for reasoning, or for none; None leaves it to the template. Messages only.
            special: whether control tokens other than EOG become text; with messages they always do.
            timeout: seconds from now on, waiting included, after which the answer ends as cancelled.
            priority: requests of larger priority come first.
            key: whom the request is for: of equal priorities, whoever was served least comes first.
            salt: requests share prefixes of their prompts with requests of the same salt only.

        Raises:
            InvalidOption: a value that does not fit.
            ConstraintError: the spec of a constraint is invalid or unsupported.
            TemplateError: the model has no chat format, or it refuses the messages.
            ContextFull: the prompt is longer than the context.
            EngineClosed: the engine is closed.
        """
        encoded = encode(self._vocab, self._formatter, prompt, thinking)
        stream = RequestStream(encoded, self._wake)
        request = Request(
            self._vocab,
            encoded.tokens,
            encoded.sampling(sampling if sampling is not None else Sampling()),
            constraint=own_constraint(constraint, self._vocab),
            stopping_criteria=stopping_criteria,
            special=special or encoded.formatter is not None,
            timeout=checked_timeout(timeout),
            priority=priority,
            key=key,
            salt=salt,
            on_event=stream.put,
            on_end=stream.end,
        )
        stream.follows(request)
        self._core.check(request)
        with self._changed:
            if self._closing:
                raise EngineClosed("the engine is closed")
            self._inbox.append(request)
            self._changed.notify_all()
        return stream

    async def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[Event]:
        """Ask for an answer and iterate over its events; see ``submit``. Leaving the iteration cancels the request."""
        with self.submit(prompt, sampling, **options) as stream:
            async for event in stream:
                yield event

    def stats(self) -> EngineStats:
        """What it does, and has done so far."""
        core = self._core
        return EngineStats(
            n_active=core.n_active,
            n_waiting=core.n_waiting + len(self._inbox),
            n_ctx=core.context.n_ctx,
            n_free=core.context.n_free,
            n_cached_sequences=core.n_cached_sequences,
            **asdict(core.totals),
        )

    def close(self) -> None:
        """Close the context; requests that are not over fail with ``EngineClosed``. Twice is fine."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _serve(self) -> None:
        """What the thread does: steps while there are requests, else nothing."""
        try:
            busy = False
            while True:
                with self._changed:
                    while not (busy or self._inbox or self._closing):
                        self._changed.wait()
                    if self._closing:
                        break
                    arrived, self._inbox = self._inbox, deque()
                for request in arrived:
                    self._core.add(request)
                busy = self._core.step()
        except BaseException as error:
            self._end(error)
            raise
        self._end(EngineClosed("the engine was closed before the request was answered"))

    def _end(self, error: BaseException) -> None:
        with self._changed:
            self._closing = True
            arrived, self._inbox = self._inbox, deque()
        for request in arrived:
            self._core.add(request)
        self._core.abort(error)
        self._core.close()
