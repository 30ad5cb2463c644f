"""The engine: answers requests of many threads and tasks together, in its own thread."""

from __future__ import annotations

import atexit
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypedDict, Unpack

from slm_core.argument_checks import check_kind
from slm_core.chat.answers import own_constraint
from slm_core.closing import Closing
from slm_core.constraints import Spec
from slm_core.display import count, preview, signature
from slm_core.display.blocks import usage_bar
from slm_core.display.html import card, table
from slm_core.engine.core import EngineCore
from slm_core.engine.options import EngineOptions
from slm_core.engine.prompts import EncodedPrompt, Prompt, encode
from slm_core.engine.recorder import Recorder
from slm_core.engine.requests import Request, checked_id
from slm_core.engine.stats import EngineStats, RequestStatus, rss_bytes
from slm_core.engine.streams import CompletionsQueue, CompletionsStream, EventQueue, RequestStream
from slm_core.errors import BackendError, EngineClosed
from slm_core.generation.completions import checked_completions
from slm_core.generation.control import checked_timeout
from slm_core.generation.events import Event
from slm_core.generation.speculation import Speculation
from slm_core.generation.stopping import StoppingCriterion
from slm_core.generation.trained import TrainedLength
from slm_core.keywords import check_keywords, checked_keywords
from slm_core.protocols import Adapters, Constraint, Context, Formatter, Vocab
from slm_core.sampling import LogitsProcessor, Sampling

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from slm_core.engine.tracing import RequestTracer

_POSITIONS_S = 0.1
"""Seconds between two counts of the positions."""


class SharedOptions(TypedDict, total=False):
    """Options of ``Engine.completions``: the options of ``Engine.submit`` except ``constraint`` and ``thinking``."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    speculation: Speculation | None
    stopping_criteria: Sequence[StoppingCriterion]
    logits_processors: Sequence[LogitsProcessor]
    special: bool
    timeout: float | None
    priority: float
    key: str
    salt: str
    adapters: Mapping[str, float] | None
    request_id: str | None


class RequestOptions(SharedOptions, total=False):
    """Options of ``Engine.generate``, the same as of ``Engine.submit``."""

    constraint: Constraint | Spec | None
    thinking: bool | None


_COMPLETIONS = ("prompt", "n", "sampling", "best_of", "constraint", "thinking")
"""Arguments of ``Engine.completions`` besides its shared options."""
_LISTED = 16
"""The largest number of requests that HTML lists."""

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _close_engines() -> None:
    """Close the open engines when Python ends: an engine's thread in native code would abort the process."""
    for engine in tuple(_engines):
        engine.close()


def _named(options: SharedOptions, request_id: str) -> SharedOptions:
    return {**options, "request_id": request_id}


def _request_tracer(provider: TracerProvider, model_name: str) -> RequestTracer:
    from slm_core.engine.tracing import RequestTracer

    return RequestTracer(provider, model_name)


class Engine(Closing):
    """Answers requests of any number of threads and tasks over one context; ``Model.engine`` returns it.

    Args:
        context: the KV cache; closed with the engine.
        vocab: the model's vocabulary.
        formatter: returns the model's chat format, or raises ``TemplateError``.
        options: how requests share the context.
        model_name: the name of the model in metrics and traces.
        adapters: the adapters that are loaded for the model; None for none.
        n_ctx_train: the longest context in training, in tokens: the first longer prompt gives a warning in the log. 0
            for no warning.
        tracer_provider: a tracer provider of OpenTelemetry: each request becomes a span; None for no traces.
        clock: the clock of measurements, in seconds.

    Attributes:
        recorder: measures its requests.
        ended: gets the error that ended the engine, or ``EngineClosed`` after ``close``.

    Raises:
        MissingExtra: there is a ``tracer_provider``, but OpenTelemetry is not installed.
        InvalidOption: ``tracer_provider`` is not a tracer provider.
    """

    def __init__(
        self,
        context: Context,
        vocab: Vocab,
        formatter: Callable[[], Formatter],
        options: EngineOptions,
        *,
        model_name: str = "",
        adapters: Adapters | None = None,
        n_ctx_train: int = 0,
        tracer_provider: TracerProvider | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model_name = model_name
        self._adapters = adapters
        self._trained = TrainedLength(n_ctx_train)
        self._tracer = None if tracer_provider is None else _request_tracer(tracer_provider, model_name)
        self.recorder = Recorder(clock, None if self._tracer is None else self._tracer.trace)
        self._core = EngineCore(context, options, self.recorder, contained=BaseException)
        self._positions = self._core.positions()
        self._positions_at = self.recorder.clock()
        self._vocab = vocab
        self._formatter = formatter
        self._inbox: deque[Request] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._step_began: float | None = None
        self.ended: Future[BaseException] = Future()
        self._thread = threading.Thread(target=self._serve, name="slm-engine", daemon=True)
        self._thread.start()
        _engines.add(self)
        atexit.unregister(_close_engines)  # the last handler is the first to run: before the process of an isolated
        atexit.register(_close_engines)  # model is ended, which would look like a crash

    def __repr__(self) -> str:
        if self._closing:
            return signature(self, preview(self._model_name), "closed")
        stats = self.stats()
        return signature(
            self,
            preview(self._model_name),
            f"{stats.n_active} active",
            f"{stats.n_waiting} waiting",
            f"{stats.n_ctx - stats.n_free:,} of {stats.n_ctx:,} positions used",
        )

    def _repr_html_(self) -> str:
        stats = self.stats()
        used = asdict(stats.positions)
        rows = [(r.request_id, f"{r.state}, {count(r.completion_tokens, 'token')}") for r in stats.requests[:_LISTED]]
        bar = usage_bar([(use, used[use]) for use in ("own", "shared", "cached", "free")])
        return card(
            f"Engine: {count(stats.n_ctx, 'position')}", bar, table([("answered", f"{stats.n_finished:,}"), *rows])
        )

    @checked_keywords
    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        constraint: Constraint | Spec | None = None,
        speculation: Speculation | None = None,
        stopping_criteria: Sequence[StoppingCriterion] = (),
        logits_processors: Sequence[LogitsProcessor] = (),
        thinking: bool | None = None,
        special: bool = False,
        timeout: float | None = None,
        priority: float = 0,
        key: str = "",
        salt: str = "",
        adapters: Mapping[str, float] | None = None,
        request_id: str | None = None,
    ) -> RequestStream:
        """Submit a request and return at once. Any thread may call this.

        Args:
            prompt: a text to continue, its tokens, messages, or a ``Conversation``: messages with tools.
            sampling: how tokens are chosen.
            max_tokens: the most tokens of the answer. If this or one of the next four is None, ``sampling`` decides.
            temperature: divides the logits; 0 chooses the likeliest token.
            top_p: keep the likeliest tokens that together reach this probability.
            seed: the seed of the draws.
            stop: texts that end the answer.
            constraint: restricts the answer; None for no constraint.
            speculation: drafts for the answer, while they pay; the answer is the same, or drawn from the same
                distribution. A draft model or a ``SuffixIndex`` serves one history, and is refused.
            stopping_criteria: called in order after each token, in the engine's thread; PAUSE fails the request.
            logits_processors: change each row of logits before the chain of ``sampling`` reads it, in order, in the
                engine's thread; see ``sampling.LogitsProcessor``.
            thinking: turn reasoning on or off; None uses the template's default. Messages only.
            special: whether control tokens other than EOG become text; with messages they always do.
            timeout: seconds from now on, including the time in the queue, after which the answer ends as cancelled;
                None for no limit.
            priority: requests of larger priority come first.
            key: the client of the request: among equal priorities, the least served key comes first.
            salt: requests share prefixes only with requests of the same salt.
            adapters: adapters (LoRA) of the model by name, with their scales; None for none. Requests share prefixes
                only with requests of the same adapters. A step decodes requests of different adapters one set after the
                other.
            request_id: its name in metrics, traces, errors and logs, 1 to 128 printable characters; None for a random
                name. Requests that are not over have distinct names.

        Raises:
            InvalidOption: an invalid value.
            UnknownOption: an unknown keyword.
            ConstraintError: the spec of a constraint is invalid or unsupported.
            TemplateError: the model has no chat format, or the chat format refuses the messages.
            ContextFull: the prompt is longer than the context.
            EngineClosed: the engine is closed, or of the process that forked this one.
        """
        encoded = encode(self._vocab, self._formatter, prompt, thinking)
        queue: EventQueue[Event] = EventQueue(self._core.notifications)
        request = self._request(
            encoded,
            sampling,
            own_constraint(encoded.constraint(constraint), self._vocab),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop,
            speculation=speculation,
            stopping_criteria=stopping_criteria,
            logits_processors=logits_processors,
            special=special,
            timeout=timeout,
            priority=priority,
            key=key,
            salt=salt,
            adapters=adapters,
            on_event=queue.put,
            on_end=queue.end,
            request_id=request_id,
        )
        self._send([request])
        return RequestStream(encoded, request, queue, self._wake)

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
        """Submit ``n`` requests for one prompt, which is computed once. Returns at once; any thread may call this.

        Completion i draws from stream i of the seed, for any ``n``; completion 0 is the answer of ``submit``.

        Args:
            prompt: a text to continue, its tokens, messages, or a ``Conversation``: messages with tools.
            n: the number of completions, up to 4096.
            sampling: how tokens are chosen.
            best_of: make this many completions, and keep the n with the largest mean log probability.
            constraint: restricts the completions; each completion has a copy.
            thinking: turn reasoning on or off; None uses the template's default. Messages only.
            options: the other options of ``submit``; completion i has the id ``request_id`` with "-i".

        Raises:
            InvalidOption: ``n`` is below 1, ``best_of`` below ``n``, or one of them above 4096; ``submit``
                lists the other errors.
        """
        check_keywords("completions", options, (*_COMPLETIONS, *SharedOptions.__annotations__))
        check_kind("sampling", sampling, Sampling)
        n_completions = checked_completions(n, best_of)
        encoded = encode(self._vocab, self._formatter, prompt, thinking)
        rule = own_constraint(encoded.constraint(constraint), self._vocab)
        sampling = sampling if sampling is not None else Sampling()
        if sampling.seed is None:  # one seed, with a stream for each completion
            sampling = replace(sampling, seed=secrets.randbits(63))
        queue = CompletionsQueue(n_completions, self._core.notifications)
        name = checked_id(options.get("request_id"))
        requests = [
            self._request(
                encoded,
                sampling,
                None if rule is None else rule.clone(),
                stream=i,
                on_event=partial(queue.put_one, i),
                on_end=queue.end_one,
                **_named(options, f"{name}-{i}"),
            )
            for i in range(n_completions)
        ]
        self._send(requests)
        return CompletionsStream(encoded, requests, queue, n if best_of is not None else None, self._wake)

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
        check_kind("sampling", sampling, Sampling)
        speculation = options.get("speculation")
        check_kind("speculation", speculation, Speculation)
        sampling = (sampling if sampling is not None else Sampling()).override(
            max_tokens=options.get("max_tokens"),
            temperature=options.get("temperature"),
            top_p=options.get("top_p"),
            seed=options.get("seed"),
            stop=options.get("stop"),
        )
        self._trained.check(len(prompt.tokens))
        request = Request(
            self._vocab,
            prompt.tokens,
            prompt.sampling(sampling),
            message_ends=prompt.message_ends,
            constraint=constraint,
            speculation=speculation,
            special=options.get("special", False) or prompt.formatter is not None,
            timeout=checked_timeout(options.get("timeout")),
            stopping_criteria=options.get("stopping_criteria", ()),
            logits_processors=options.get("logits_processors", ()),
            priority=options.get("priority", 0),
            key=options.get("key", ""),
            salt=options.get("salt", ""),
            adapters=options.get("adapters") or {},
            loaded=self._adapters,
            stream=stream,
            on_event=on_event,
            on_end=on_end,
            request_id=options.get("request_id"),
            clock=self.recorder.clock,
        )
        if self._tracer is not None:
            request.origin = self._tracer.origin(chat=prompt.formatter is not None)
        return request

    def _send(self, requests: Sequence[Request]) -> None:
        """Send requests to the engine's thread, all or none."""
        for request in requests:
            self._core.check(request)
        self._core.notifications.check_process()
        with self._changed:
            if self._closing:
                raise EngineClosed("the engine is closed")
            self.recorder.admit(*requests)
            self._inbox.extend(requests)
            self._changed.notify_all()

    async def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[Event]:
        """Submit a request and iterate over its events; see ``submit``. Leaving the iteration cancels the request."""
        with self.submit(prompt, sampling, **options) as stream:
            async for event in stream:
                yield event

    @property
    def step_s(self) -> float:
        """Seconds since the running step began; 0.0 between steps. Any thread may call this."""
        began = self._step_began
        return 0.0 if began is None else self.recorder.clock() - began

    def stats(self) -> EngineStats:
        """The engine's state and counters. Any thread may call this."""
        core, recorded, now = self._core, self.recorder.recorded(), self.recorder.clock()
        latencies, living, n_active = recorded.latencies, self.recorder.living, core.n_active
        return EngineStats(
            n_active=n_active,
            n_waiting=max(0, len(living) - n_active),  # a request that is being moved is in no list of the core
            n_ctx=core.context.n_ctx,
            n_free=core.context.n_free,
            n_cached_sequences=core.n_cached_sequences,
            positions=self._positions,
            rss_bytes=rss_bytes(),
            requests_per_s=recorded.rates["requests"],
            prompt_tokens_per_s=recorded.rates["prompt_tokens"],
            completion_tokens_per_s=recorded.rates["completion_tokens"],
            queue_s=latencies["queue_s"],
            prefill_s=latencies["prefill_s"],
            first_token_s=latencies["first_token_s"],
            inter_token_s=latencies["inter_token_s"],
            total_s=latencies["total_s"],
            requests=tuple(RequestStatus.of(request, now) for request in living),
            **asdict(core.totals),
        )

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all sequences kept so far are on disk; returns False after ``timeout`` seconds.

        Sequences that are dropped for other requests in the meantime are not written. Without a ``cache_dir`` it
        returns at once.

        Raises:
            SessionError: a callback of a request calls it: the engine's thread would wait for itself.
        """
        self._core.notifications.check_wait("the disk")
        return self._core.flush(timeout)

    @cached_property
    def registry(self) -> CollectorRegistry:
        """A registry of prometheus-client with the metrics of this engine only.

        Raises:
            MissingExtra: prometheus-client is not installed.
        """
        from slm_core.engine.prometheus import registry_of

        return registry_of(self, self._model_name)

    def metrics_text(self) -> bytes:
        """The engine's metrics in the text format of Prometheus, UTF-8. Any thread may call this.

        Raises:
            MissingExtra: prometheus-client is not installed.
        """
        from slm_core.engine.prometheus import metrics_text

        return metrics_text(self.registry)

    def close(self) -> None:
        """Close the context; requests that are not over fail with ``EngineClosed``. A second call does nothing.

        Engines that are open when Python ends are closed then.
        """
        if not self._thread.is_alive():  # it has closed the context, or runs only in the parent of a forked process
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _serve(self) -> None:
        """The main loop of the engine's thread: step while there are requests, then wait."""
        try:
            busy = False
            while self._receive(wait=not busy):
                self._step_began = self.recorder.clock()
                self._core.notifications.hold()
                busy = self._core.step()
                self._note_positions(busy)
                self._step_began = None
                if not busy:
                    self._core.notifications.release()
        except BaseException as error:
            self._end(error)
            if not isinstance(error, BackendError):  # requests raise the error; a defect is also printed
                raise
        else:
            self._end(EngineClosed("the engine was closed before the request was answered"))

    def _receive(self, *, wait: bool) -> bool:
        """Add the requests that have arrived; ``wait`` for one. Returns False if the engine is closing."""
        with self._changed:
            while wait and not (self._inbox or self._closing):
                self._changed.wait()
            if self._closing:
                return False
            arrived, self._inbox = self._inbox, deque()
        self._add(arrived)
        return True

    def _add(self, requests: Iterable[Request]) -> None:
        """Add requests to the queue; a request that cannot be added fails alone."""
        for request in requests:
            try:
                self._core.add(request)
            except Exception as error:
                self._core.refuse(request, error)

    def _note_positions(self, busy: bool) -> None:
        """Count the positions at intervals: counting in each step would take longer than the rest of the step."""
        now = self.recorder.clock()
        if not busy or now - self._positions_at >= _POSITIONS_S:
            self._positions, self._positions_at = self._core.positions(), now

    def _end(self, error: BaseException) -> None:
        with self._changed:
            self._closing = True
            arrived, self._inbox = self._inbox, deque()
        self._add(arrived)
        self._core.abort(error)
        try:
            self._core.close()
        finally:
            self._core.notifications.release()
            self.ended.set_result(error)
