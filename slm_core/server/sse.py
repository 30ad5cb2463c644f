"""Answers of generation requests: event streams, and JSON. Written once for all APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import anyio
import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slm_core.server.answering import Answering, Outcome, TokenUsage
from slm_core.server.calls import Call, call_of, until_lost
from slm_core.server.errors import ApiError, api_error
from slm_core.server.log import ServerLog
from slm_core.server.options import ServerOptions
from slm_core.server.pieces import Choice, Piece
from slm_core.server.registry import ModelRegistry
from slm_core.server.requests import GenerationRequest

ENCODER = msgspec.json.Encoder()
EVENT_STREAM = "text/event-stream"
LINES = "application/x-ndjson"
"""Lines of JSON."""
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
    return name + b"data: " + ENCODER.encode(data) + b"\n\n"


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
    call, registry = call_of(http.scope), registry_of(http)
    answering = Answering(registry, request, key=call.key, request_id=call.engine_id)
    call.facts["stream"] = writer is not None

    async def whole() -> Response:
        async with answering:
            call.facts["model"] = answering.running.name
            try:
                choices = await answering.choices()
                return json_response(join(answering, choices))
            finally:
                _note_usage(call, answering)

    if writer is None:
        return await until_lost(http, whole)
    await until_lost(http, answering.__aenter__)
    call.facts["model"] = answering.running.name
    return AnswerStream(answering, writer(answering), call, options_of(http), log_of(http), media_type)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(ENCODER.encode(value), status, headers, "application/json")


def registry_of(http: Request) -> ModelRegistry:
    """The server's models."""
    registry: ModelRegistry = http.app.state.registry
    return registry


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
    ) -> None:
        self._answering = answering
        self._writer = writer
        self._call = call
        self._log = log
        super().__init__(
            self._frames(),
            media_type=media_type,
            ping=options.ping_s if media_type == EVENT_STREAM else _NO_PING_S,
            ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"),
            send_timeout=options.send_timeout_s,
            shutdown_grace_period=options.grace_s,
        )

    async def _frames(self) -> AsyncIterator[bytes]:
        writer = self._writer
        try:
            for each in writer.begin():
                yield each
            async for piece in self._answering.pieces():
                for each in writer.piece(piece):
                    yield each
            last = list(writer.end(self._answering.outcomes, self._answering.usage))
        except Exception as error:  # the status is sent already: the stream says it
            refusal = api_error(error)
            self._call.facts["error"] = refusal.code
            if refusal.status >= 500:
                self._log.failure(self._call, error)
            last = list(writer.error(refusal))
        for each in last:
            yield each

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; whatever ends it, the request is over afterwards."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            _note_usage(self._call, self._answering)
            with anyio.CancelScope(shield=True):
                await self._answering.__aexit__(None, None, None)


def _note_usage(call: Call, answering: Answering) -> None:
    usage = answering.usage
    facts: dict[str, Any] = call.facts
    facts |= {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    }
