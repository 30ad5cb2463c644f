"""The engine: requests of many threads and tasks, answered together by a thread of its own."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypedDict, Unpack

from slm_core.chat.answers import own_constraint
from slm_core.closing import Closing
from slm_core.constraints import Spec
from slm_core.engine.core import EngineCore, EngineOptions
from slm_core.engine.prompts import EncodedPrompt, Prompt, encode
from slm_core.engine.requests import Request, fresh_id
from slm_core.engine.streams import CompletionsStream, RequestStream
from slm_core.errors import EngineClosed
from slm_core.generation.completions import checked_completions
from slm_core.generation.control import checked_timeout
from slm_core.generation.events import Event
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
        disk_tokens: of those, tokens that were read from disk.
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
    disk_tokens: int
    completion_tokens: int
    computed_tokens: int
    n_ctx: int
    n_free: int
    n_cached_sequences: int


class SharedOptions(TypedDict, total=False):
    """Options of ``Engine.completions``: those of ``Engine.submit`` but ``constraint`` and ``thinking``."""

    stopping_criteria: Sequence[StoppingCriterion]
    special: bool
    timeout: float | None
    priority: float
    key: str
    salt: str
    request_id: str | None


class RequestOptions(SharedOptions, total=False):
    """Options of ``Engine.generate``: those of ``Engine.submit``."""

    constraint: Constraint | Spec | None
    thinking: bool | None


def _named(options: SharedOptions, request_id: str) -> SharedOptions:
    return {**options, "request_id": request_id}


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
        request_id: str | None = None,
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
            request_id: its name in metrics, traces, errors and logs, of 1 to 128 printable characters; None for a fresh
                one. No two requests that are not over have the same.

        Raises:
            InvalidOption: a value that does not fit.
            ConstraintError: the spec of a constraint is invalid or unsupported.
            TemplateError: the model has no chat format, or it refuses the messages.
            ContextFull: the prompt is longer than the context.
            EngineClosed: the engine is closed.
        """
        encoded = encode(self._vocab, self._formatter, prompt, thinking)
        stream = RequestStream(encoded, self._wake)
        request = self._request(
            encoded,
            sampling,
            own_constraint(constraint, self._vocab),
            stopping_criteria=stopping_criteria,
            special=special,
            timeout=timeout,
            priority=priority,
            key=key,
            salt=salt,
            on_event=stream.put,
            on_end=stream.end,
            request_id=request_id,
        )
        stream.follows(request)
        self._send([request])
        return stream

    def completions(
        self,
        prompt: Prompt,
        n: int,
        sampling: Sampling | None = None,
        *,
        best_of: int | None = None,
        constraint: Constraint | Spec | None = None,
        thinking: bool | None = None,
        **options: Unpack[SharedOptions],
    ) -> CompletionsStream:
        """Ask for ``n`` answers to one prompt, which is computed once; returns at once. From any thread.

        Completion i draws from stream i of the seed, however many there are; number 0 says what ``submit`` would.

        Args:
            prompt: a text to continue, its tokens, or messages.
            n: completions.
            sampling: how tokens are chosen.
            best_of: make so many, and keep those n with the largest mean log probability.
            constraint: what may be said; each completion has a copy.
            thinking: ask for reasoning, or for none; None leaves it to the template. Messages only.
            options: the others of ``submit``; completion i has the id ``request_id`` with "-i".

        Raises:
            InvalidOption: ``n`` is below 1, or ``best_of`` below ``n``; and see ``submit``, for the other errors, too.
        """
        n_made = checked_completions(n, best_of)
        encoded = encode(self._vocab, self._formatter, prompt, thinking)
        rule = own_constraint(constraint, self._vocab)
        sampling = sampling if sampling is not None else Sampling()
        if sampling.seed is None:  # one seed, and a stream of it for each
            sampling = replace(sampling, seed=secrets.randbits(63))
        stream = CompletionsStream(encoded, n_made, n if best_of is not None else None, self._wake)
        name = options.get("request_id") or fresh_id()
        requests = [
            self._request(
                encoded,
                sampling,
                None if rule is None else rule.clone(),
                stream=i,
                on_event=partial(stream.put, i),
                on_end=stream.end_one,
                **_named(options, f"{name}-{i}"),
            )
            for i in range(n_made)
        ]
        stream.follows(requests)
        self._send(requests)
        return stream

    def _request(
        self,
        prompt: EncodedPrompt,
        sampling: Sampling | None,
        constraint: Constraint | None,
        *,
        stream: int = 0,
        on_event: Callable[[Event], None],
        on_end: Callable[[], None],
        **options: Unpack[SharedOptions],
    ) -> Request:
        return Request(
            self._vocab,
            prompt.tokens,
            prompt.sampling(sampling if sampling is not None else Sampling()),
            constraint=constraint,
            special=options.get("special", False) or prompt.formatter is not None,
            timeout=checked_timeout(options.get("timeout")),
            stopping_criteria=options.get("stopping_criteria", ()),
            priority=options.get("priority", 0),
            key=options.get("key", ""),
            salt=options.get("salt", ""),
            stream=stream,
            on_event=on_event,
            on_end=on_end,
            request_id=options.get("request_id"),
        )

    def _send(self, requests: Sequence[Request]) -> None:
        """Hand requests to the thread, all of them or none."""
        for request in requests:
            self._core.check(request)
        with self._changed:
            if self._closing:
                raise EngineClosed("the engine is closed")
            self._core.recorder.admit(*requests)
            self._inbox.extend(requests)
            self._changed.notify_all()

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

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what is kept so far is on disk; returns whether it came to that within ``timeout`` seconds.

        What requests needed the room of in the meantime is not written. Without a ``cache_dir`` there is nothing to
        wait for.
        """
        return self._core.flush(timeout)

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
