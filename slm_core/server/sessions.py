"""Conversations that the server keeps, and clients edit: /v1/sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from slm_core.server.calls import call_of
from slm_core.server.errors import ApiError
from slm_core.server.fields import Items, Strict
from slm_core.server.large_bodies import LargeBodyRoute
from slm_core.server.openai_chat import (
    ChatMessage,
    Tool,
)
from slm_core.server.session_store import ServedSession, SessionStore, size_of
from slm_core.server.sse import (
    json_response,
    registry_of,
)

router = APIRouter(tags=["Sessions"], route_class=LargeBodyRoute)
BUSY: dict[int | str, dict[str, Any]] = {409: {"description": "The session is answering."}}


class NewSession(Strict):
    """The body of a request for a session."""

    model: str | None = Field(None, description="A name from /v1/models; the first model by default.")
    name: str = ""
    messages: Items[ChatMessage] = Field(default_factory=list)
    tools: Items[Tool] = Field(default_factory=list)


class Dump(NewSession):
    """A dump; ``model`` may be replaced by another one."""

    object: Literal["session.dump"]
    version: Literal[1]


class ForkRequest(Strict):
    """The body of a request for a fork."""

    n_messages: int | None = Field(None, ge=0, description="Only the first messages; all by default.")
    name: str = ""


class EditRequest(Strict):
    """The body of a request to replace a message."""

    message: ChatMessage


class TruncateRequest(Strict):
    """The body of a request to keep only the first messages."""

    n_messages: int = Field(ge=0)


class ForgetRequest(Strict):
    """The body of a request to forget messages: from ``start``, before ``end``."""

    start: int = Field(ge=0)
    end: int = Field(ge=1)


@router.post("/v1/sessions")
async def create(body: NewSession, http: Request) -> Response:
    """Keep a conversation."""
    return await _shown(await _added(http, body))


@router.get("/v1/sessions")
async def sessions(http: Request) -> Response:
    """The client's sessions, without messages."""
    store, key = store_of(http), call_of(http.scope).key
    return await to_thread.run_sync(
        lambda: json_response({"object": "list", "data": [session.listed() for session in store.of(key)]})
    )


@router.post("/v1/sessions/restore")
async def restore(body: Dump, http: Request) -> Response:
    """A session from a dump; it may be of another server, model or backend."""
    return await _shown(await _added(http, body))


@router.get("/v1/sessions/{session_id}")
async def session(session_id: str, http: Request) -> Response:
    """A session with its messages."""
    return await _shown(session_of(http, session_id))


@router.delete("/v1/sessions/{session_id}", responses=BUSY)
async def delete(session_id: str, http: Request) -> Response:
    """Forget a session."""
    session = session_of(http, session_id)
    with session.changing():
        await to_thread.run_sync(store_of(http).remove, session)
    return json_response({"id": session_id, "object": "session", "deleted": True})


@router.get("/v1/sessions/{session_id}/dump")
async def dump(session_id: str, http: Request) -> Response:
    """The session for /v1/sessions/restore."""
    session = session_of(http, session_id)
    return await to_thread.run_sync(
        lambda: json_response({"object": "session.dump", "version": 1, **session.content()})
    )


@router.post("/v1/sessions/{session_id}/fork")
async def fork(session_id: str, body: ForkRequest, http: Request) -> Response:
    """A copy of a session. Both share cells of the KV cache."""
    session = session_of(http, session_id)
    n_messages = _checked(session, body.n_messages, "n_messages")
    name, messages = body.name or session.name, session.messages[:n_messages]
    session_id, store = _new_id(http), store_of(http)

    def add() -> ServedSession:
        twin = ServedSession(session_id, session.key, session.model, name, messages, session.tools)
        store.add(twin)
        return twin

    return await _shown(await to_thread.run_sync(add))


@router.patch("/v1/sessions/{session_id}/messages/{number}", responses=BUSY)
async def edit(session_id: str, number: int, body: EditRequest, http: Request) -> Response:
    """Replace a message; later messages stay, and are computed again for the next answer."""
    session = session_of(http, session_id)
    with session.changing():
        number = _checked_number(session, number)
        changed = [*session.messages[:number], body.message, *session.messages[number + 1 :]]
        await _change(http, session, changed, [body.message])
    return await _shown(session)


@router.delete("/v1/sessions/{session_id}/messages/{number}", responses=BUSY)
async def delete_message(session_id: str, number: int, http: Request) -> Response:
    """Delete a message; later messages stay, and are computed again for the next answer."""
    session = session_of(http, session_id)
    with session.changing():
        number = _checked_number(session, number)
        await _change(http, session, [*session.messages[:number], *session.messages[number + 1 :]])
    return await _shown(session)


@router.post("/v1/sessions/{session_id}/truncate", responses=BUSY)
async def truncate(session_id: str, body: TruncateRequest, http: Request) -> Response:
    """Keep the first messages only."""
    session = session_of(http, session_id)
    with session.changing():
        await _change(http, session, session.messages[: _checked(session, body.n_messages, "n_messages")])
    return await _shown(session)


@router.post("/v1/sessions/{session_id}/forget", responses=BUSY)
async def forget(session_id: str, body: ForgetRequest, http: Request) -> Response:
    """Cut messages out of the KV cache: later messages are not computed again, and keep their values.

    The server needs ``--reuse cut``. After the next answer, the session's usage has their number, ``shifted_tokens``.
    """
    session = session_of(http, session_id)
    if registry_of(http).find(session.model).served.settings.reuse != "cut":
        raise ApiError(400, "forgetting needs slm serve --reuse cut; DELETE computes later messages again")
    with session.changing():
        _checked(session, body.end, "end")
        if body.start >= body.end:
            raise ApiError(400, f"start is {body.start}, and end is {body.end}", param="start")
        await _change(http, session, [*session.messages[: body.start], *session.messages[body.end :]])
    return await _shown(session)


@router.get("/v1/sessions/{session_id}/cells")
async def cells(session_id: str, http: Request) -> Response:
    """How the model's KV cache is used: cells of one request, shared cells, cached prefixes, free cells."""
    session = session_of(http, session_id)
    async with registry_of(http).lease(session.model) as running:
        stats = running.engine.stats()
    positions = stats.positions
    return json_response(
        {
            "n_ctx": stats.n_ctx,
            "own": positions.own,
            "shared": positions.shared,
            "cached": positions.cached,
            "free": positions.free,
            "session_tokens": None if session.usage is None else session.usage["total_tokens"],
        }
    )


def store_of(http: Request) -> SessionStore:
    """The server's sessions."""
    store: SessionStore = http.app.state.sessions
    return store


def session_of(http: Request, session_id: str) -> ServedSession:
    """The client's session with an id.

    Raises:
        ApiError: there is none.
    """
    return store_of(http).get(session_id, call_of(http.scope).key)


async def _added(http: Request, body: NewSession) -> ServedSession:
    model, session_id, store = registry_of(http).find(body.model).name, _new_id(http), store_of(http)

    def add() -> ServedSession:
        added = ServedSession(session_id, call_of(http.scope).key, model, body.name, body.messages, body.tools)
        store.add(added)
        return added

    return await to_thread.run_sync(add)


async def _change(
    http: Request, session: ServedSession, messages: list[ChatMessage], added: Sequence[ChatMessage] = ()
) -> None:
    """Replace the messages of a session, in a thread: a long session takes long, and its file waits for the disk."""
    store = store_of(http)

    def change() -> None:
        if added:
            store.check_size(size_of(added))
        store.update(session, messages)

    await to_thread.run_sync(change)


async def _shown(session: ServedSession) -> Response:
    """A session as clients see it, encoded in a thread."""
    return await to_thread.run_sync(lambda: json_response(session.json()))


def _new_id(http: Request) -> str:
    return f"sess_{call_of(http.scope).new_id()}"


def _checked(session: ServedSession, n: int | None, param: str) -> int:
    n_messages = len(session.messages)
    if n is not None and n > n_messages:
        raise ApiError(400, f"{param} is {n}, but the session has {n_messages} messages", param=param)
    return n_messages if n is None else n


def _checked_number(session: ServedSession, number: int) -> int:
    if not 0 <= number < len(session.messages):
        raise ApiError(404, f"there is no message {number} (the session has {len(session.messages)})")
    return number
