"""A replica: the application over models of its own, called with requests as values."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import anyio
from starlette.types import Message, Scope

from slm_core.server.app import create_app
from slm_core.server.calls import FORWARDED, call_of
from slm_core.server.cluster.forwarding import Ended, Request, Sent, Whole, tag_of
from slm_core.server.options import ServerOptions
from slm_core.server.registry import ModelRegistry, ServedModel
from slm_core.server.response_store import FinishedResponse, ResponseStore
from slm_core.server.session_store import ServedSession, SessionStore


@dataclass(frozen=True, slots=True)
class Belongings:
    """The state that a replica leaves to another replica when it ends.

    Attributes:
        tags: its tag, and the tags of the replicas whose sessions it took over.
        sessions: its sessions; their prompts are computed again.
        responses: its stored responses.
    """

    tags: Sequence[str]
    sessions: Sequence[ServedSession]
    responses: Sequence[FinishedResponse]


class Replica:
    """One of several servers of the same models.

    Args:
        name: its name, which no other replica has or had.
        models: the models; the first one is loaded by ``start``.
        options: its options; the front has checked who may call.

    Attributes:
        tag: the beginning of the ids of its sessions and responses.
        tags: its tag, and the tags of replicas that ended and left their sessions to it.
    """

    def __init__(self, name: str, models: Sequence[ServedModel], options: ServerOptions) -> None:
        self.tag = tag_of(name)
        self.tags = [self.tag]
        self._app = create_app(models, replace(options, allowed_origins=()), log=sys.stderr)
        self._options = options
        self._running = AsyncExitStack()

    async def start(self) -> None:
        """Load the first model.

        Raises:
            SlmError: it cannot be loaded.
        """
        await self._running.enter_async_context(self._app.router.lifespan_context(self._app))

    async def end_answers(self) -> None:
        """End all answers with an error, in the form of their API."""
        await self._app.state.end_answers()

    async def close(self) -> None:
        """Close all models."""
        await self._running.aclose()

    async def answer(self, request: Request) -> AsyncGenerator[Sequence[Sent | Ended]]:
        """The answer to a request, as it comes: each part is returned at once.

        Leaving the iteration is the same as a client that closes its connection.
        """
        exchange = _Exchange(request, self.tag)
        task = asyncio.create_task(exchange.run(self._app))
        try:
            while not exchange.is_over:
                yield await exchange.take()
        finally:
            exchange.lost.set()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([task])

    async def whole(self, request: Request) -> Whole:
        """The whole answer to a request that ends soon."""
        status, body = 500, bytearray()
        async for parts in self.answer(request):
            for part in parts:
                if isinstance(part, Sent):
                    status = status if part.status is None else part.status
                    body += part.body
        return Whole(self.tag, status, bytes(body))

    @property
    def is_healthy(self) -> bool:
        """Whether no engine has failed or hangs."""
        registry: ModelRegistry = self._app.state.registry
        hangs = any(running.engine.step_s > self._options.hang_s for running in registry.running)
        return not hangs and not registry.restarting and not any(running.has_failed for running in registry.running)

    async def belongings(self) -> Belongings:
        """The state for another replica. Background responses may continue for ``grace_s`` seconds before."""
        responses: ResponseStore = self._app.state.responses
        await responses.close(self._options.grace_s)
        sessions: SessionStore = self._app.state.sessions
        return Belongings(tuple(self.tags), sessions.all, responses.finished())

    def adopt(self, belongings: Belongings) -> None:
        """Take over the state of another replica."""
        self._app.state.sessions.adopt(belongings.sessions)
        self._app.state.responses.adopt(belongings.responses)
        self.tags += [tag for tag in belongings.tags if tag not in self.tags]


class _Exchange:
    """One request to the application, and the parts of its answer so far.

    Attributes:
        lost: set when nobody waits for the answer.
        is_over: whether the end was taken.
    """

    def __init__(self, request: Request, tag: str) -> None:
        self._request = request
        self._scope: Scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "method": request.method, "path": request.path, "raw_path": request.path.encode(), "root_path": "",
            "query_string": request.query, "headers": list(request.headers), "client": None, "server": None,
            FORWARDED: request.forwarded(tag),
        }  # fmt: skip
        self._sent: list[Sent | Ended] = []
        self._changed = asyncio.Event()
        self._is_received = False
        self.is_over = False
        self.lost = asyncio.Event()

    async def run(self, app: Any) -> None:
        """Let the application answer."""
        is_complete = False
        try:
            await app(self._scope, self._receive, self._send)
            is_complete = True
        except Exception:  # noqa: S110  # the application has logged it, or nobody listens
            pass
        finally:
            route = getattr(self._scope.get("route"), "path", "unknown")
            self._add(Ended(is_complete, route, dict(call_of(self._scope).facts)))

    async def take(self) -> Sequence[Sent | Ended]:
        """The parts that were sent since the last call; waits for the first part."""
        await self._changed.wait()
        self._changed.clear()
        sent, self._sent = self._sent, []
        self.is_over = isinstance(sent[-1], Ended)
        return _joined(sent)

    async def _receive(self) -> Message:
        if not self._is_received:
            self._is_received = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self.lost.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = tuple((bytes(name), bytes(value)) for name, value in message["headers"])
            self._add(Sent(b"", message["status"], headers))
        elif message.get("body"):
            self._add(Sent(bytes(message["body"])))

    def _add(self, part: Sent | Ended) -> None:
        self._sent.append(part)
        self._changed.set()


def _joined(parts: Iterable[Sent | Ended]) -> list[Sent | Ended]:
    """The parts, with consecutive bodies joined: fewer objects."""
    joined: list[Sent | Ended] = []
    for part in parts:
        before = joined[-1] if joined else None
        if isinstance(part, Sent) and part.status is None and isinstance(before, Sent):
            joined[-1] = Sent(before.body + part.body, before.status, before.headers)
        else:
            joined.append(part)
    return joined
