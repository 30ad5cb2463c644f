"""Bodies of requests that take long to validate: they are validated in a thread, not in the event loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import to_thread
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Receive, Scope

from slm_core.server.errors import validation_error

if TYPE_CHECKING:
    from fastapi._compat import ModelField

_T = TypeVar("_T")
LARGE_BYTES = 8192
"""The length from which a body counts as large, in bytes. A shorter body takes at most about 5 ms: a message has at
least 27 bytes, and takes 15 us."""


class LargeBodyRoute(APIRoute):
    """A route whose large bodies are parsed and validated in a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See ``APIRoute``."""
        answer, field = super().get_route_handler(), self.body_field
        if field is None:
            return answer

        async def handle(request: Request) -> Response:
            return await answer(_Validated(request.scope, request.receive, field))

        return handle


class _Validated(Request):
    """A request whose JSON, if it is large, is the validated body: FastAPI does not validate it again."""

    def __init__(self, scope: Scope, receive: Receive, field: ModelField) -> None:
        super().__init__(scope, receive)
        self._field = field

    async def json(self) -> Any:
        """The body.

        Raises:
            ApiError: a large body is invalid.
        """
        if len(await self.body()) < LARGE_BYTES:
            return await super().json()
        return await to_thread.run_sync(_validated, await self.body(), self._field)


async def off_loop(http: Request, work: Callable[[], _T]) -> _T:
    """The result of work whose time grows with the body; for a large body, it runs in a thread."""
    if len(await http.body()) < LARGE_BYTES:
        return work()
    return await to_thread.run_sync(work)


def _validated(body: bytes, field: ModelField) -> object:
    """The validated body.

    Raises:
        ApiError: it is invalid.
        ValueError, RecursionError: it is not JSON.
    """
    # The hooks are code in Python, so that other threads get the GIL while a long body is parsed.
    parsed = json.loads(body, object_hook=_unchanged, parse_int=_integer, parse_float=_number)
    value, errors = field.validate(parsed, loc=("body",))
    if errors:
        raise validation_error(errors)
    return value


def _unchanged(value: dict[str, object]) -> dict[str, object]:
    return value


def _integer(text: str) -> int:
    return int(text)


def _number(text: str) -> float:
    return float(text)
