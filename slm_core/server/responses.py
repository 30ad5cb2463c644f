"""OpenAI's Responses: POST /v1/responses, and stored responses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

import anyio
from fastapi import APIRouter, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from slm_core.server.answering import Answering
from slm_core.server.calls import Call, call_of
from slm_core.server.errors import ApiError
from slm_core.server.large_bodies import LargeBodyRoute, off_loop
from slm_core.server.log import ServerLog
from slm_core.server.response_store import ResponseStore, StoredResponse, cancel
from slm_core.server.responses_events import ResponseWriter
from slm_core.server.responses_fields import InputItem, MessageItem, PromptFields, ResponsesRequest
from slm_core.server.sse import (
    EVENT_STREAM,
    STREAMED,
    AnswerStream,
    json_response,
    log_of,
    options_of,
    registry_of,
    stream_frames,
    submit,
    whole_answer,
)

router = APIRouter(tags=["Responses"], route_class=LargeBodyRoute)
_NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"description": "There is no such response."}}


@router.post("/v1/responses", responses=STREAMED)
async def create(body: ResponsesRequest, http: Request) -> Response:
    """Answer items of a conversation."""
    body.check()
    call, store = call_of(http.scope), _store(http)
    earlier = _earlier(http, body)
    request = await off_loop(http, lambda: body.generation(earlier))
    writer = ResponseWriter(f"resp_{call.engine_id}", body)
    stored = StoredResponse(
        writer.response["id"], call.key, writer.response, earlier, body.items(), is_background=bool(body.background)
    )

    def keep() -> None:
        if body.is_stored:
            store.put(stored)

    if not body.background and not body.stream:
        return await whole_answer(http, request, lambda answering: _collect(answering, writer, keep))
    answering = await submit(http, request)
    writer.start(answering)
    if not body.background:
        writer.on_end = keep
        return AnswerStream(answering, writer, call, options_of(http), log_of(http), EVENT_STREAM)
    stored.task = asyncio.create_task(_generate(answering, writer, stored, store, call, log_of(http)))
    await asyncio.sleep(0)  # the task begins, so that cancelling it runs its `finally`
    keep()
    return _events(http, stored, 0) if body.stream else json_response(stored.response)


@router.post("/v1/responses/input_tokens")
async def input_tokens(body: PromptFields, http: Request) -> Response:
    """The number of tokens of a prompt."""
    earlier = _earlier(http, body)
    conversation = await off_loop(http, lambda: body.conversation(earlier))
    async with registry_of(http).lease(body.model) as running:
        tokens = await running.tokens(conversation)
    return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})


@router.get("/v1/responses/{response_id}", responses={**STREAMED, **_NOT_FOUND})
async def retrieve(
    response_id: str, http: Request, stream: bool = False, starting_after: int | None = None
) -> Response:
    """A stored response; with ``stream``, the events of a background response after number ``starting_after``."""
    stored = _found(http, response_id)
    if not stream:
        if starting_after is not None:
            raise ApiError(400, "starting_after is for streams: set stream to true", param="starting_after")
        return json_response(stored.response)
    if not stored.is_background:
        raise ApiError(400, "only the events of background responses are kept", param="stream")
    return _events(http, stored, 0 if starting_after is None else starting_after + 1)


@router.delete("/v1/responses/{response_id}", responses=_NOT_FOUND)
async def delete(response_id: str, http: Request) -> Response:
    """Forget a response; it is cancelled if it is not over."""
    await _store(http).delete(_found(http, response_id))
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", responses=_NOT_FOUND)
async def cancel_response(response_id: str, http: Request) -> Response:
    """Cancel a background response; without effect if it is over."""
    stored = _found(http, response_id)
    if not stored.is_background:
        raise ApiError(400, "only background responses can be cancelled: close the connection of others")
    await cancel(stored)
    return json_response(stored.response)


@router.get("/v1/responses/{response_id}/input_items", responses=_NOT_FOUND)
async def input_items(
    response_id: str,
    http: Request,
    limit: int = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The items of the input, newest first by default, without the items of earlier responses."""
    if not 1 <= limit <= 100:
        raise ApiError(400, f"limit is {limit} (accepted: 1 to 100)", param="limit")
    stored = _found(http, response_id)
    items = [_item_json(stored.id, i, item) for i, item in enumerate(stored.items)]
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ApiError(400, f"there is no item {after!r:.100}", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
    return json_response({"object": "list", "data": page, **ends, "has_more": len(items) > limit})


def _store(http: Request) -> ResponseStore:
    store: ResponseStore = http.app.state.responses
    return store


def _earlier(http: Request, body: PromptFields) -> list[InputItem]:
    """The items before the input."""
    if body.previous_response_id is None:
        return []
    key = call_of(http.scope).key
    return _store(http).get(body.previous_response_id, key, "previous_response_id").conversation()


def _found(http: Request, response_id: str) -> StoredResponse:
    return _store(http).get(response_id, call_of(http.scope).key)


async def _collect(answering: Answering, writer: ResponseWriter, keep: Any) -> Mapping[str, object]:
    """The whole response."""
    writer.start(answering)
    async for piece in answering.pieces():
        for _ in writer.piece(piece):
            pass
    for _ in writer.end(answering.outcomes, answering.usage):
        pass
    keep()
    return writer.response


async def _generate(
    answering: Answering,
    writer: ResponseWriter,
    stored: StoredResponse,
    store: ResponseStore,
    call: Call,
    log: ServerLog,
) -> None:
    """Generate a background response."""
    try:
        async for frame in stream_frames(answering, writer, call, log):
            stored.add(frame)
    except asyncio.CancelledError:
        for frame in writer.cancel():
            stored.add(frame)
    finally:
        with anyio.CancelScope(shield=True):
            await answering.__aexit__(None, None, None)
        store.put(stored)
        asyncio.get_running_loop().call_soon(stored.notify)  # when the task is done


def _events(http: Request, stored: StoredResponse, first: int) -> EventSourceResponse:
    """The stream of a background response, whose generation continues if the client is lost."""
    options = options_of(http)
    return EventSourceResponse(
        stored.events(first),
        ping=options.ping_s,
        ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"),
        send_timeout=options.send_timeout_s,
        shutdown_grace_period=options.cut_s,
    )


def _item_json(response_id: str, number: int, item: InputItem) -> dict[str, Any]:
    """An item as OpenAI returns it: with an id and a status, and texts as parts."""
    fields = item.model_dump(exclude_none=True)
    kind = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}[item.type]
    fields = {"id": f"{kind}_{response_id.removeprefix('resp_')}_in{number}", "status": "completed", **fields}
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        part: dict[str, Any] = {"type": "input_text", "text": item.content}
        if item.role == "assistant":
            part = {"type": "output_text", "text": item.content, "annotations": []}
        fields["content"] = [part]
    return fields
