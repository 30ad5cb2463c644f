"""Conversations that the server keeps, and clients edit: /v1/sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from slm_core.server.answering import Answering, Outcome, TokenUsage
from slm_core.server.calls import call_of
from slm_core.server.errors import ApiError
from slm_core.server.fields import Strict
from slm_core.server.openai_chat import (
    AssistantMessage,
    ChatCompletionRequest,
    ChatMessage,
    ChunkWriter,
    Tool,
    completion,
)
from slm_core.server.openai_fields import usage_json
from slm_core.server.pieces import Choice, Piece
from slm_core.server.session_store import ServedSession, SessionStore
from slm_core.server.sse import STREAMED, answer, json_response, registry_of

router = APIRouter(tags=["Sessions"])
_BUSY: dict[int | str, dict[str, Any]] = {409: {"description": "The session is answering."}}


class NewSession(Strict):
    """The body of a request for a session."""

    model: str | None = Field(None, description="A name from /v1/models; the first model by default.")
    name: str = ""
    messages: list[ChatMessage] = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)


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
    return json_response(_add(http, body).json())


@router.get("/v1/sessions")
async def sessions(http: Request) -> Response:
    """The client's sessions, without messages."""
    listed = [session.json() for session in _store(http).of(call_of(http.scope).key)]
    for session in listed:
        session["n_messages"] = len(session.pop("messages"))
    return json_response({"object": "list", "data": listed})


@router.post("/v1/sessions/restore")
async def restore(body: Dump, http: Request) -> Response:
    """A session from a dump; it may be of another server, model or backend."""
    return json_response(_add(http, body).json())


@router.get("/v1/sessions/{session_id}")
async def session(session_id: str, http: Request) -> Response:
    """A session with its messages."""
    return json_response(_found(http, session_id).json())


@router.delete("/v1/sessions/{session_id}", responses=_BUSY)
async def delete(session_id: str, http: Request) -> Response:
    """Forget a session."""
    found = _found(http, session_id)
    with found.changing():
        _store(http).remove(found)
    return json_response({"id": session_id, "object": "session", "deleted": True})


@router.get("/v1/sessions/{session_id}/dump")
async def dump(session_id: str, http: Request) -> Response:
    """The session for /v1/sessions/restore."""
    return json_response({"object": "session.dump", "version": 1, **_found(http, session_id).content()})


@router.post("/v1/sessions/{session_id}/fork")
async def fork(session_id: str, body: ForkRequest, http: Request) -> Response:
    """A copy of a session. Both share cells of the KV cache."""
    found = _found(http, session_id)
    n_messages = _checked(found, body.n_messages, "n_messages")
    twin = ServedSession(found.key, found.model, body.name or found.name, found.messages[:n_messages], found.tools)
    _store(http).add(twin)
    return json_response(twin.json())


@router.patch("/v1/sessions/{session_id}/messages/{number}", responses=_BUSY)
async def edit(session_id: str, number: int, body: EditRequest, http: Request) -> Response:
    """Replace a message; later messages stay, and are computed again for the next answer."""
    found = _found(http, session_id)
    with found.changing():
        number = _checked_number(found, number)
        _store(http).check_size(len(body.message.model_dump_json()))
        found.messages[number] = body.message
    return json_response(found.json())


@router.delete("/v1/sessions/{session_id}/messages/{number}", responses=_BUSY)
async def delete_message(session_id: str, number: int, http: Request) -> Response:
    """Delete a message; later messages stay, and are computed again for the next answer."""
    found = _found(http, session_id)
    with found.changing():
        del found.messages[_checked_number(found, number)]
    return json_response(found.json())


@router.post("/v1/sessions/{session_id}/truncate", responses=_BUSY)
async def truncate(session_id: str, body: TruncateRequest, http: Request) -> Response:
    """Keep the first messages only."""
    found = _found(http, session_id)
    with found.changing():
        del found.messages[_checked(found, body.n_messages, "n_messages") :]
    return json_response(found.json())


@router.post("/v1/sessions/{session_id}/forget", responses=_BUSY)
async def forget(session_id: str, body: ForgetRequest, http: Request) -> Response:
    """Cut messages out of the KV cache: later messages are not computed again, and keep what they saw of them.

    The server needs ``--reuse cut``. After the next answer, the session's usage has their number, ``shifted_tokens``.
    """
    found = _found(http, session_id)
    if registry_of(http).find(found.model).settings.reuse != "cut":
        raise ApiError(400, "forgetting needs slm serve --reuse cut; DELETE computes later messages again")
    with found.changing():
        _checked(found, body.end, "end")
        if body.start >= body.end:
            raise ApiError(400, f"start is {body.start}, and end is {body.end}", param="start")
        del found.messages[body.start : body.end]
    return json_response(found.json())


@router.get("/v1/sessions/{session_id}/cells")
async def cells(session_id: str, http: Request) -> Response:
    """How the model's KV cache is used: cells of one request, shared cells, cached prefixes, free cells."""
    found = _found(http, session_id)
    async with registry_of(http).lease(found.model) as running:
        stats = running.engine.stats()
    positions = stats.positions
    return json_response(
        {
            "n_ctx": stats.n_ctx,
            "own": positions.own,
            "shared": positions.shared,
            "cached": positions.cached,
            "free": positions.free,
            "session_tokens": None if found.usage is None else found.usage["total_tokens"],
        }
    )


@router.post("/v1/sessions/{session_id}/messages", responses={**STREAMED, **_BUSY})
async def turn(session_id: str, body: ChatCompletionRequest, http: Request) -> Response:
    """Add messages and generate an answer, in the form of chat completions. If it fails, the session is unchanged."""
    found = _found(http, session_id)
    if (body.n or 1) != 1 or body.continue_final_message:
        param = "continue_final_message" if body.continue_final_message else "n"
        raise ApiError(400, f"{param} does not go with sessions", param=param)
    if body.model is not None and registry_of(http).find(body.model).name != found.model:
        raise ApiError(400, f"the session uses {found.model!r}: restore a dump with another model", param="model")
    changes = {"model": found.model, "messages": [*found.messages, *body.messages], "tools": body.tools or found.tools}
    request = body.model_copy(update={**changes, "tools": changes["tools"] or None})
    changing = ExitStack()
    changing.enter_context(found.changing())
    try:
        _store(http).check_size(sum(len(message.model_dump_json()) for message in body.messages))

        def keep(answering: Answering, choice: Choice) -> None:
            usage = {**usage_json(answering.usage), "shifted_tokens": answering.shifted_tokens}
            found.messages += [*body.messages, _message(choice)]
            found.usage = usage

        def whole(answering: Answering, choices: Sequence[Choice]) -> Mapping[str, object]:
            result = completion(answering, choices)
            keep(answering, choices[0])
            return result

        include_usage = body.stream_options is not None and body.stream_options.include_usage
        response = await answer(
            http,
            request.generation(),
            join=whole,
            writer=(lambda answering: _Turn(answering, keep, include_usage=include_usage)) if body.stream else None,
        )
    except BaseException:
        changing.close()
        raise
    return _Ending(response, changing.close)


class _Turn(ChunkWriter):
    """Writes the chunks of an answer, and keeps the answer when it is complete."""

    def __init__(self, answering: Answering, keep: Callable[[Answering, Choice], None], *, include_usage: bool) -> None:
        super().__init__(answering, include_usage=include_usage)
        self._choice = Choice(0)
        self._keep = keep

    def piece(self, piece: Piece) -> Iterable[bytes]:
        """One chunk."""
        self._choice.add(piece)
        return super().piece(piece)

    def end(self, outcomes: Sequence[Outcome], usage: TokenUsage) -> Iterable[bytes]:
        """The answer is complete."""
        self._keep(self._answering, self._choice)
        return super().end(outcomes, usage)


class _Ending(Response):
    """A response, and what happens after it, however it ends."""

    def __init__(self, response: Response, after: Callable[[], None]) -> None:
        self._response = response
        self.background = None
        self._after = after

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the response; see the ASGI specification."""
        try:
            await self._response(scope, receive, send)
        finally:
            self._after()


def _store(http: Request) -> SessionStore:
    store: SessionStore = http.app.state.sessions
    return store


def _found(http: Request, session_id: str) -> ServedSession:
    return _store(http).get(session_id, call_of(http.scope).key)


def _add(http: Request, body: NewSession) -> ServedSession:
    model = registry_of(http).find(body.model).name
    added = ServedSession(call_of(http.scope).key, model, body.name, body.messages, body.tools)
    _store(http).add(added)
    return added


def _checked(session: ServedSession, n: int | None, param: str) -> int:
    n_messages = len(session.messages)
    if n is not None and n > n_messages:
        raise ApiError(400, f"{param} is {n}, but the session has {n_messages} messages", param=param)
    return n_messages if n is None else n


def _checked_number(session: ServedSession, number: int) -> int:
    if not 0 <= number < len(session.messages):
        raise ApiError(404, f"there is no message {number} (the session has {len(session.messages)})")
    return number


def _message(choice: Choice) -> AssistantMessage:
    """An answer as a message."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.calls
    ]
    fields: dict[str, Any] = {"role": "assistant", "content": choice.content}
    if choice.reasoning:
        fields["reasoning_content"] = choice.reasoning
    if calls:
        fields["tool_calls"] = calls
    return AssistantMessage.model_validate(fields)
