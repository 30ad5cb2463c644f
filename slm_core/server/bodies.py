"""Plain ASGI middleware that reads the body of a request, within limits, before anything else is done with it."""

from __future__ import annotations

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slm_core.server.calls import call_of
from slm_core.server.errors import ApiError
from slm_core.server.middleware import refuse
from slm_core.server.options import ServerOptions

_MOST_TOGETHER = 8
"""The largest total size of all bodies, in units of the longest body."""


class Bodies:
    """Refuses bodies that are too long, or that take too long to arrive.

    A body is read as a whole first, so that a client that does not send occupies no place and no computation.

    Args:
        app: the application.
        options: the limits.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._longest = options.max_body_bytes
        self._timeout_s = options.receive_timeout_s
        self._n_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it; see the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            try:
                with anyio.fail_after(self._timeout_s):
                    is_whole = await self._read(scope, receive, body)
            except TimeoutError:
                message = f"the body did not arrive within {self._timeout_s:g} seconds"
                await refuse(_closing(ApiError(408, message, "body_timeout")), scope, receive, send)
                return
            except ApiError as error:
                await refuse(_closing(error), scope, receive, send)
                return
            if is_whole:
                await self._app(scope, _again(bytes(body), receive), send)
            else:
                call_of(scope).facts["error"] = "client_lost"
        finally:
            self._n_bytes -= len(body)

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> bool:
        """Read the body; returns False if the client was lost.

        Raises:
            ApiError: it is too long.
        """
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit():
            self._check(int(length))
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            part = message.get("body", b"")
            self._check(len(body) + len(part))
            if self._n_bytes + len(part) > _MOST_TOGETHER * self._longest:
                headers = {"retry-after": "1"}
                raise ApiError(429, "too many long requests: try again later", "rate_limit_exceeded", headers=headers)
            body += part
            self._n_bytes += len(part)
            if not message.get("more_body", False):
                return True

    def _check(self, n_bytes: int) -> None:
        if n_bytes > self._longest:
            message = f"the body is longer than {self._longest / 2**20:g} MiB (slm serve --max-body SIZE)"
            raise ApiError(413, message, "body_too_long")


def _closing(error: ApiError) -> ApiError:
    """The error, with a header that closes the connection, because the rest of the body is not read."""
    return ApiError(error.status, str(error), error.code, headers={**error.headers, "connection": "close"})


def _again(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that begins with the body."""
    is_sent = False

    async def next_message() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
