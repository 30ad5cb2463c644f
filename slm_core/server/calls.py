"""One HTTP request while it is answered: its id, its client, and what its log line says."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import anyio
from starlette.requests import Request
from starlette.types import Receive, Scope

_T = TypeVar("_T")
_SCOPE_KEY = "slm_core.call"
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ClientLost(Exception):
    """The client closed the connection before the answer was complete."""


@dataclass(slots=True)
class Call:
    """What the server knows of one HTTP request.

    Attributes:
        request_id: the request's id, from its header ``x-request-id`` or random.
        key: the client; "" without keys.
        engine_id: the request's id in the engine and in answers. It is random: clients may repeat ``request_id``.
        facts: what the log line says in addition: numbers and names, never texts of prompts and answers.
    """

    request_id: str
    key: str = ""
    engine_id: str = field(default_factory=lambda: secrets.token_hex(12))
    facts: dict[str, object] = field(default_factory=dict)


def begin_call(scope: Scope) -> Call:
    """The call of a new HTTP request; it belongs to the scope."""
    headers = dict(scope["headers"])
    sent = headers.get(b"x-request-id", b"").decode("latin-1")
    call = Call(sent if _ID.fullmatch(sent) else secrets.token_hex(12))
    scope[_SCOPE_KEY] = call
    return call


def call_of(scope: Scope) -> Call:
    """The call of an HTTP request."""
    return cast("Call", scope[_SCOPE_KEY])


async def until_lost(http: Request, work: Callable[[], Awaitable[_T]]) -> _T:
    """The result of ``work``, which is cancelled if the client closes the connection.

    Call it after the body was read.

    Raises:
        ClientLost: the client closed the connection.
    """
    results: list[_T] = []
    errors: list[Exception] = []

    async def run() -> None:
        try:
            results.append(await work())
        except Exception as error:
            errors.append(error)
        group.cancel_scope.cancel()

    async def watch() -> None:
        await _lost(http.receive)
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        group.start_soon(run)
    if errors:
        raise errors[0]
    if not results:
        raise ClientLost
    return results[0]


async def _lost(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
