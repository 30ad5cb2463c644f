"""Answers of generation requests as event streams or JSON, for all APIs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Protocol

import anyio
from anyio import to_thread
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from slm_core.server.answering import Answering, Outcome, TokenUsage
from slm_core.server.calls import Call, call_of, until_lost
from slm_core.server.errors import ApiError, api_error
from slm_core.server.json_text import encoded
from slm_core.server.keys import Limits
from slm_core.server.log import ServerLog
from slm_core.server.options import ServerOptions
from slm_core.server.pieces import Choice, Piece
from slm_core.server.registry import ModelRegistry
from slm_core.server.requests import GenerationRequest

EVENT_STREAM = "text/event-stream"
LINES = "application/x-ndjson"
"""Lines of JSON."""
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {EVENT_STREAM: {}}}}
"""For routes: an answer may be an event stream."""
LINED: dict[int | str, dict[str, Any]] = {200: {"content": {LINES: {}}}}
"""For routes: an answer may be lines of JSON."""
_NO_PING_S = 365 * 86400
"""Seconds between pings where the format has none: longer than any answer."""


class StreamWriter(Protocol):
    """Translates the pieces of a request to the frames of one API's event stream."""

    def begin(self) -> Iterable[bytes]:
        """The frames before the first piece."""
        ...

    def piece(self, piece: Piece) -> Iterable[bytes]:
        """The frames of a piece."""
        ...

    def end(self, outcomes: Sequence[Outcome], usage: TokenUsage) -> Iterable[bytes]:
        """The frames after the last piece of a complete answer."""
        ...

    def error(self, error: ApiError) -> Iterable[bytes]:
        """The frames that end the stream of a failed request."""
        ...


Join = Callable[[Answering, Sequence[Choice]], Mapping[str, object]]
"""Translates joined answers to the JSON of one API."""


def frame(data: object, event: str | None = None) -> bytes:
    """A frame of an event stream with JSON data."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + encoded(data) + b"\n\n"


async def answer(
    http: Request,
    request: GenerationRequest,
    *,
    join: Join,
    writer: Callable[[Answering], StreamWriter] | None,
    media_type: str = EVENT_STREAM,
) -> Response:
    """The answer to a generation request. If the client is lost, the request is cancelled.

    Args:
        http: the HTTP request; its body was read.
        request: what to generate.
        join: makes the JSON of a whole answer.
        writer: makes the writer of a stream; None for a whole answer.
        media_type: the media type of a stream.

    Raises:
        SlmError: the request is refused, or failed before the first byte of the answer.
        ClientLost: the client closed the connection.
    """

    async def collect(answering: Answering) -> Mapping[str, object]:
        return join(answering, await answering.choices())

    if writer is None:
        return await whole_answer(http, request, collect)
    return await stream_answer(http, request, writer, media_type)


async def stream_answer(
    http: Request,
    request: GenerationRequest,
    writer: Callable[[Answering], StreamWriter],
    media_type: str = EVENT_STREAM,
    *,
    ends_in_thread: bool = False,
) -> Response:
    """The stream of a request; see ``answer`` for arguments and errors.

    With ``ends_in_thread``, a thread calls the writer's ``end``, which takes long.
    """
    answering, call = await submit(http, request), call_of(http.scope)
    call.facts["stream"] = True
    options, log = options_of(http), log_of(http)
    return AnswerStream(answering, writer(answering), call, options, log, media_type, ends_in_thread=ends_in_thread)


async def whole_answer(
    http: Request, request: GenerationRequest, collect: Callable[[Answering], Awaitable[Mapping[str, object]]]
) -> Response:
    """The answer to a request that is not streamed; see ``answer`` for the errors.

    Args:
        http: the HTTP request; its body was read.
        request: what to generate.
        collect: reads the answer, and makes its JSON.
    """
    return await whole_answers(http, [request], lambda answerings: collect(answerings[0]))


async def whole_answers(
    http: Request,
    requests: Sequence[GenerationRequest],
    collect: Callable[[Sequence[Answering]], Awaitable[Mapping[str, object]]],
) -> Response:
    """One answer to requests of one model that are generated together; see ``whole_answer``."""
    call = call_of(http.scope)
    call.facts["stream"] = False

    async def work() -> Response:
        n_places = sum(request.n_answers for request in requests)
        if len(requests) > 1:
            limits_of(http).check_answers(call.key, n_places, "prompt")
        async with AsyncExitStack() as stack:
            answerings = list[Answering]()
            for i, request in enumerate(requests):
                suffix = f"-{i}" if len(requests) > 1 else ""
                answering = answering_of(http, request, suffix, answerings, 0 if answerings else n_places)
                answerings.append(await stack.enter_async_context(answering))
            call.facts["model"] = answerings[0].running.name
            try:
                return json_response(await collect(answerings))
            finally:
                _note_usage(call, total_usage(answerings))

    return await until_lost(http.receive, work)


async def submit(http: Request, request: GenerationRequest) -> Answering:
    """A request that the engine has accepted; see ``answer`` for the errors. The caller calls its ``__aexit__``."""
    answering = answering_of(http, request)
    await until_lost(http.receive, answering.__aenter__)
    call_of(http.scope).facts["model"] = answering.running.name
    return answering


def answering_of(
    http: Request,
    request: GenerationRequest,
    suffix: str = "",
    begun: Sequence[Answering] = (),
    n_places: int | None = None,
) -> Answering:
    """A request that is not submitted yet.

    Args:
        http: the HTTP request.
        request: what to generate.
        suffix: distinguishes its id from the ids of other requests of the same HTTP request.
        begun: the answers of these other requests that have begun.
        n_places: see ``Answering``. The first request of several takes the places of all: two clients that took them
            one by one would refuse each other.
    """
    call = call_of(http.scope)
    name = call.engine_id + suffix
    registry, limits = registry_of(http), limits_of(http)
    return Answering(registry, limits, request, key=call.key, request_id=name, begun=begun, n_places=n_places)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(encoded(value), status, headers, "application/json")


def registry_of(http: Request) -> ModelRegistry:
    """The server's models."""
    registry: ModelRegistry = http.app.state.registry
    return registry


def limits_of(http: Request) -> Limits:
    """The limits of the server's keys."""
    limits: Limits = http.app.state.limits
    return limits


def options_of(http: Request) -> ServerOptions:
    """The server's options."""
    options: ServerOptions = http.app.state.options
    return options


def log_of(http: Request) -> ServerLog:
    """The server's log."""
    log: ServerLog = http.app.state.log
    return log


class AnswerStream(EventSourceResponse):
    """The stream of a request: it ends with the writer's last frames, or with an error.

    It cancels the request when the client is lost, or reads nothing for too long. An event stream has pings.
    """

    def __init__(
        self,
        answering: Answering,
        writer: StreamWriter,
        call: Call,
        options: ServerOptions,
        log: ServerLog,
        media_type: str,
        *,
        ends_in_thread: bool = False,
    ) -> None:
        self._answering = answering
        self._call = call
        self._sending_since: float | None = None
        super().__init__(
            stream_frames(answering, writer, call, log, ends_in_thread=ends_in_thread),
            media_type=media_type,
            ping=options.ping_s if media_type == EVENT_STREAM else _NO_PING_S,
            ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"),
            data_sender_callable=partial(self._watch, options.send_timeout_s),
            shutdown_grace_period=options.cut_s,
        )

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Send a message. The library opens a cancel scope for each, which takes a third of the time of a token."""
        self._sending_since = time.monotonic()
        await send(message)
        self._sending_since = None

    async def _watch(self, timeout_s: float) -> None:
        """Raise if the client has read nothing for too long."""
        while True:
            await anyio.sleep(timeout_s / 4)
            if self._sending_since is not None and time.monotonic() - self._sending_since > timeout_s:
                raise SendTimeoutError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; whatever ends it, the request is over afterwards."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            _note_usage(self._call, self._answering.usage)
            with anyio.CancelScope(shield=True):
                await self._answering.__aexit__(None, None, None)


async def stream_frames(
    answering: Answering, writer: StreamWriter, call: Call, log: ServerLog, *, ends_in_thread: bool = False
) -> AsyncIterator[bytes]:
    """The frames of a request's stream, ending with the frames of its end, or of an error."""

    def end() -> Iterable[bytes]:
        return writer.end(answering.outcomes, answering.usage)

    try:
        for each in writer.begin():
            yield each
        async for piece in answering.pieces():
            for each in writer.piece(piece):
                yield each
        for each in await to_thread.run_sync(lambda: tuple(end())) if ends_in_thread else end():
            yield each
    except Exception as error:  # the status was sent already: the error goes into the stream
        refusal = api_error(error)
        call.facts["error"] = refusal.code
        if refusal.status >= 500:
            log.failure(call, error)
        for each in writer.error(refusal):
            yield each


def total_usage(answerings: Sequence[Answering]) -> TokenUsage:
    """Tokens of several requests, so far."""
    usages = [answering.usage for answering in answerings]
    return TokenUsage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        sum(usage.reasoning_tokens for usage in usages),
    )


def _note_usage(call: Call, usage: TokenUsage) -> None:
    facts: dict[str, Any] = call.facts
    facts |= {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    }
