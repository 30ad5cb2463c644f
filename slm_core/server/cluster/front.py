"""The front, which clients call. It checks requests, passes them to replicas, and passes answers back as they come."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Protocol, TextIO

import anyio
from anyio import to_thread
from sse_starlette.sse import SendTimeoutError
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from slm_core.errors import SlmError
from slm_core.server.app import middleware
from slm_core.server.calls import Call, ClientLost, call_of, until_lost
from slm_core.server.cluster.forwarding import Ended, Request, Sent, Whole, fields_of, home_of, prompt_text
from slm_core.server.cluster.merging import MERGED
from slm_core.server.errors import ApiError
from slm_core.server.keys import Limits
from slm_core.server.large_bodies import LARGE_BYTES
from slm_core.server.log import ServerLog
from slm_core.server.metrics import HttpMetrics
from slm_core.server.middleware import refuse
from slm_core.server.options import ServerOptions

_UNLIMITED = sys.maxsize
_OWN_HEADERS = (b"x-request-id",)
"""Headers that the front writes itself."""


class ReplicaLost(SlmError):
    """A replica ended while it answered, or there is none."""


class Replicas(Protocol):
    """The replicas, wherever they are."""

    async def start(self) -> None:
        """Wait for the first replica.

        Raises:
            SlmError: there will be none.
        """
        ...

    async def end_answers(self) -> None:
        """End all answers with an error."""
        ...

    async def close(self) -> None:
        """End all replicas, after their answers."""
        ...

    def answer(self, request: Request) -> AsyncGenerator[Sent | Ended]:
        """The answer of the replica that is chosen for a request. Leaving the iteration cancels it.

        Raises:
            ReplicaLost: the replica ended before the answer did.
        """
        ...

    async def all_answers(self, request: Request) -> Sequence[Whole]:
        """The answers of all replicas.

        Raises:
            ReplicaLost: one does not answer in time.
        """
        ...


def create_front(replicas: Replicas, options: ServerOptions, *, log: TextIO | None = sys.stderr) -> Starlette:
    """The ASGI application of the front. Its lifespan starts and closes the replicas.

    Args:
        replicas: the replicas.
        options: who may call, and limits. Those of bodies and rates hold for all replicas together; ``max_requests``,
            and the ``requests`` and ``cells`` of keys, hold for each replica.
        log: the file of the log; None for no log.
    """
    metrics = HttpMetrics()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            await _start(app, replicas)
            yield
        finally:
            await replicas.close()

    limits = Limits(options.api_keys, _UNLIMITED)
    app = Starlette(lifespan=lifespan, middleware=middleware(options, limits, ServerLog(log), metrics))
    app.state.options, app.state.startup_error, app.state.end_answers = options, None, replicas.end_answers
    app.router.default = _Front(replicas, options, metrics)
    return app


async def _start(app: Starlette, replicas: Replicas) -> None:
    try:
        await replicas.start()
    except SlmError as error:
        app.state.startup_error = error
        raise


class _Front:
    """Passes requests on. The middleware has read the body and checked the client."""

    def __init__(self, replicas: Replicas, options: ServerOptions, metrics: HttpMetrics) -> None:
        self._replicas = replicas
        self._send_timeout_s = options.send_timeout_s
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; see the ASGI specification."""
        if scope["type"] != "http":  # there are no WebSockets here
            await send({"type": "websocket.close"})
            return
        body = (await receive())["body"]
        is_large = len(body) >= LARGE_BYTES
        request = await to_thread.run_sync(_read, scope, body) if is_large else _read(scope, body)
        merge = MERGED.get((request.method, request.path))
        if merge is not None:
            scope["route"] = SimpleNamespace(path=request.path)
            try:
                answers = await self._replicas.all_answers(request)
            except ReplicaLost:
                await refuse(_unavailable("not all replicas answered"), scope, receive, send)
                return
            await merge(answers, self._metrics)(scope, receive, send)
            return
        with suppress(ClientLost):
            await until_lost(receive, lambda: self._forward(request, scope, receive, send))

    async def _forward(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        call, is_begun = call_of(scope), False
        for may_try_again in (not request.home, False):
            try:
                async with aclosing(self._replicas.answer(request)) as answer:
                    async for part in answer:
                        if isinstance(part, Sent):
                            await self._pass(part, send, is_begun=is_begun)
                            is_begun = True
                        else:
                            _note(part, call, scope)
                if is_begun:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            except ReplicaLost:
                if may_try_again and not is_begun:
                    continue
                call.facts["error"] = "replica_lost"
                if is_begun:
                    raise  # cut the connection: an incomplete answer must not look complete
                await refuse(_unavailable("the replica that answered has ended"), scope, receive, send)
                return

    async def _pass(self, part: Sent, send: Send, *, is_begun: bool) -> None:
        """Send a part of an answer to the client.

        Raises:
            SendTimeoutError: the client reads nothing.
        """
        try:
            with anyio.fail_after(self._send_timeout_s):
                if not is_begun:
                    headers = [(name, value) for name, value in part.headers if name not in _OWN_HEADERS]
                    await send({"type": "http.response.start", "status": part.status, "headers": headers})
                if part.body:
                    await send({"type": "http.response.body", "body": part.body, "more_body": True})
        except TimeoutError as error:
            raise SendTimeoutError from error


def _unavailable(message: str) -> ApiError:
    return ApiError(503, f"{message}: try again", "replica_lost", headers={"retry-after": "1"})


def _read(scope: Scope, body: bytes) -> Request:
    """The request of a scope."""
    call, fields = call_of(scope), fields_of(body)
    return Request(
        method=scope["method"],
        path=scope["path"],
        query=scope["query_string"],
        headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
        body=body,
        request_id=call.request_id,
        key=call.key,
        text=prompt_text(fields),
        home=home_of(scope["path"], fields),
    )


def _note(end: Ended, call: Call, scope: Scope) -> None:
    """Note the end of an answer.

    Raises:
        ReplicaLost: it is not complete.
    """
    scope["route"] = SimpleNamespace(path=end.route)
    call.facts |= end.facts
    if not end.is_complete:
        raise ReplicaLost("the answer ended early")
