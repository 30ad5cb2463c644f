"""One HTTP request while it is answered: its id, its client, and its log line."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import anyio
from starlette.types import Receive, Scope

_T = TypeVar("_T")
_SCOPE_KEY = "slm_core.call"
FORWARDED = "slm_core.forwarded"
"""The key of a scope for its ``Forwarded``. No client can set it."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ClientLost(Exception):
    """The client closed the connection before the answer was complete."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The properties of a request that another process has checked and passed on.

    Attributes:
        request_id: the request's id.
        key: the client; "" without keys.
        tag: the beginning of ids that this process makes: an even number of hexadecimal digits.
    """

    request_id: str
    key: str
    tag: str


@dataclass(slots=True)
class Call:
    """The state of one HTTP request.

    Attributes:
        request_id: the request's id, from its header ``x-request-id`` or random.
        key: the client; "" without keys.
        tag: the beginning of new ids.
        engine_id: the request's id in the engine and in answers. It is random: clients may repeat ``request_id``.
        facts: additional values of the log line: numbers and names, never texts of prompts and answers.
    """

    request_id: str
    key: str = ""
    tag: str = ""
    engine_id: str = field(init=False)
    facts: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine_id = self.new_id()

    def new_id(self) -> str:
        """24 hexadecimal digits, random after the tag."""
        return self.tag + secrets.token_hex(12 - len(self.tag) // 2)


def begin_call(scope: Scope) -> Call:
    """The call of a new HTTP request; it belongs to the scope."""
    forwarded = forwarded_of(scope)
    if forwarded is not None:
        call = Call(forwarded.request_id, forwarded.key, forwarded.tag)
    else:
        sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        call = Call(sent if _ID.fullmatch(sent) else secrets.token_hex(12))
    scope[_SCOPE_KEY] = call
    return call


def forwarded_of(scope: Scope) -> Forwarded | None:
    """The properties of a request that another process passed on; None for a request of a client."""
    return cast("Forwarded | None", scope.get(FORWARDED))


def call_of(scope: Scope) -> Call:
    """The call of an HTTP request."""
    return cast("Call", scope[_SCOPE_KEY])


async def until_lost(receive: Receive, work: Callable[[], Awaitable[_T]]) -> _T:
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
        await _lost(receive)
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
