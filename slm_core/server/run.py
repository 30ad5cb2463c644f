"""Runs the server with uvicorn."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
from collections.abc import Awaitable, Callable

import uvicorn
from starlette.applications import Starlette

from slm_core.errors import InvalidOption
from slm_core.server.connections import TimedProtocol
from slm_core.server.options import ServerOptions


class Server(uvicorn.Server):
    """A server that reports when it accepts requests, and when it stops ends the answers that exceed ``grace_s``.

    Args:
        app: the application.
        options: its options.
        started: called when it accepts requests.
    """

    def __init__(self, app: Starlette, options: ServerOptions, started: Callable[[], None] = lambda: None) -> None:
        super().__init__(config_of(app, options))
        self._say = started
        self._grace_s = options.grace_s
        self._end_answers: Callable[[], Awaitable[None]] = app.state.end_answers

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server``."""
        await super().startup(sockets)
        if self.started:
            self._say()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server``. It cuts connections a moment after answers were ended."""
        over = asyncio.Event()
        ending = asyncio.create_task(self._end_late_answers(over))
        try:
            await super().shutdown(sockets)
        finally:
            over.set()
            await ending

    async def _end_late_answers(self, over: asyncio.Event) -> None:
        """End the answers that are not over after the grace period, unless the server is ``over`` before."""
        try:
            await asyncio.wait_for(over.wait(), self._grace_s)
        except TimeoutError:
            await self._end_answers()


def run(app: Starlette, options: ServerOptions, port: int, started: Callable[[str], None]) -> None:
    """Answer requests until SIGINT or SIGTERM; then running answers may continue for ``options.grace_s``.

    Args:
        app: the application; ``app.state.end_answers`` ends all answers with an error.
        options: its options.
        port: the port; 0 for any free one.
        started: called with the server's URL when it answers.

    Raises:
        InvalidOption: it cannot listen on the address.
        SlmError: the first model cannot be loaded.
    """
    errors = logging.getLogger("uvicorn.error")
    errors.disabled = True  # a failed start is raised, not logged

    def say(url: str) -> None:
        gc.collect()
        gc.freeze()  # imported modules stay: a collection that visits their objects stops all streams, for about 0.1 s
        errors.disabled = False
        started(url)

    with _bound(options.host, port) as listener:
        url = f"http://{_shown(options.host)}:{listener.getsockname()[1]}"
        try:
            Server(app, options, lambda: say(url)).run([listener])
        except SystemExit:  # a failed start
            if app.state.startup_error is None:
                raise
        finally:
            errors.disabled = False
    if app.state.startup_error is not None:
        raise app.state.startup_error


def config_of(app: Starlette, options: ServerOptions) -> uvicorn.Config:
    """How uvicorn runs the server."""
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    return uvicorn.Config(
        app,
        http=TimedProtocol,
        loop="asyncio",  # uvloop is no faster here, and would be used only where another package requires it
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(options.cut_s),
    )


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record is not in the server's own log, which has the exceptions of requests."""
    return not record.getMessage().startswith("Exception in ASGI application")


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InvalidOption(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def _shown(host: str) -> str:
    """The host for a URL."""
    if host in ("0.0.0.0", "::"):  # noqa: S104  # compared, not bound
        return "localhost"
    return f"[{host}]" if ":" in host else host
