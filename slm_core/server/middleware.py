"""Plain ASGI middleware: log lines, and who may call."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping

from sse_starlette.sse import SendTimeoutError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slm_core.server.calls import begin_call, call_of, forwarded_of
from slm_core.server.errors import ApiError, api_error, envelope_for
from slm_core.server.keys import Limits
from slm_core.server.log import ServerLog
from slm_core.server.metrics import HttpMetrics
from slm_core.server.options import ServerOptions
from slm_core.server.sse import json_response

_OPEN = ("/", "/health", "/ready")
"""Paths that need no key. The page itself asks its user for the key."""
_LOST = 499
"""The status in the log if the client was lost before there was one; nginx uses it, too."""


class Recording:
    """Gives each request an id, measures and logs it, and answers unexpected errors.

    Args:
        app: the application.
        log: the log.
        metrics: counts requests.
    """

    def __init__(self, app: ASGIApp, log: ServerLog, metrics: HttpMetrics) -> None:
        self._app = app
        self._log = log
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it; see the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call, started, status = begin_call(scope), time.perf_counter(), _LOST

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (b"x-request-id", call.request_id.encode())
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except SendTimeoutError:
            call.facts["error"] = "client_reads_nothing"
            raise  # uvicorn closes the connection
        except Exception as error:  # nothing above answers it
            self._log.failure(call, error)
            if status != _LOST:
                raise
            await refuse(api_error(error), scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            route = scope.get("route")
            path = getattr(route, "path", "unknown")
            self._metrics.count(path, scope["method"], status, seconds)
            self._log.request(call, scope["method"], path, status, seconds)


class Access:
    """Refuses requests with a foreign Host or Origin, and requests without a key.

    Args:
        app: the application.
        options: who may call.
        limits: counts the requests of keys.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, limits: Limits) -> None:
        self._app = app
        self._options = options
        self._limits = limits
        self._digests = {_digest(key.key): key.name for key in options.api_keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it; see the ASGI specification."""
        if scope["type"] != "http" or forwarded_of(scope) is not None:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        error = self._place_error(headers, scope["scheme"]) or self._key_error(headers, scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await refuse(error, scope, receive, send)

    def _place_error(self, headers: Mapping[str, str], scheme: str) -> ApiError | None:
        """The error of a request of a web page that is not allowed to call."""
        host = headers.get("host", "")
        if not self._options.allows_host(host):
            message = f"the Host header {host!r:.100} is not allowed (slm serve --allowed-host NAME allows it)"
            return ApiError(403, message, "host_not_allowed")
        origin = headers.get("origin")
        if origin in (None, f"{scheme}://{host}", *self._options.allowed_origins):
            return None
        message = f"the origin {origin!r:.100} is not allowed (slm serve --allow-origin ORIGIN allows it)"
        return ApiError(403, message, "origin_not_allowed")

    def _key_error(self, headers: Mapping[str, str], scope: Scope) -> ApiError | None:
        if not self._digests or scope["path"] in _OPEN or _is_preflight(headers, scope):
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(key)
        names = [name for known, name in self._digests.items() if hmac.compare_digest(known, digest)]
        if not names:
            hint = {"www-authenticate": "Bearer"}
            message = "the API key is missing or wrong (Authorization: Bearer KEY)"
            return ApiError(401, message, "invalid_api_key", headers=hint)
        call_of(scope).key = names[0]
        try:
            self._limits.count(names[0])
        except ApiError as error:
            return error
        return None


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error."""
    body = envelope_for(scope["path"])(error, call_of(scope).request_id)
    await json_response(body, error.status, error.headers)(scope, receive, send)


def _is_preflight(headers: Mapping[str, str], scope: Scope) -> bool:
    """Whether a browser asks which requests a page may make; it sends no key then."""
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()
