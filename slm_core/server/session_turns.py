"""Answers in sessions: POST /v1/sessions/{id}/messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from anyio import CancelScope, to_thread
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from slm_core.openai_shapes import call_shape
from slm_core.server.answering import Answering, Outcome, TokenUsage
from slm_core.server.calls import call_of
from slm_core.server.errors import ENDED_BY_SERVER, ApiError
from slm_core.server.fields import Items
from slm_core.server.large_bodies import LargeBodyRoute
from slm_core.server.openai_chat import AssistantMessage, ChatCompletionRequest, ChatMessage, ChunkWriter, completion
from slm_core.server.openai_fields import usage_json
from slm_core.server.pieces import Choice, Piece
from slm_core.server.requests import GenerationRequest
from slm_core.server.session_store import ServedSession, size_of
from slm_core.server.sessions import BUSY, session_of, store_of
from slm_core.server.sse import STREAMED, log_of, registry_of, stream_answer, whole_answer

router = APIRouter(tags=["Sessions"], route_class=LargeBodyRoute)


class TurnRequest(ChatCompletionRequest):
    """The body of a request for an answer, in the form of chat completions."""

    messages: Items[ChatMessage] = Field(
        default_factory=list, description="Messages to add; without any, the session's last message is answered."
    )
    keep_partial: bool = Field(
        False,
        description="If the client closes the connection of the stream, or the server ends the answer because it stops"
        " or unloads the model, keep the answer as far as it came.",
    )


@router.post("/v1/sessions/{session_id}/messages", responses={**STREAMED, **BUSY})
async def turn(session_id: str, body: TurnRequest, http: Request) -> Response:
    """Add messages and generate an answer, in the form of chat completions. If it fails, the session is unchanged."""
    session = session_of(http, session_id)
    writers: list[_TurnWriter] = []

    def keep(answering: Answering, answer: Choice | None, shifted_tokens: int) -> None:
        usage = {**usage_json(answering.usage), "shifted_tokens": shifted_tokens}
        added = [*body.messages, *([] if answer is None else [_message(answer)])]
        store_of(http).update(session, [*session.messages, *added], usage)

    async def collect(answering: Answering) -> Mapping[str, object]:
        choices = await answering.choices()
        result = completion(answering, choices)
        await to_thread.run_sync(keep, answering, choices[0], answering.shifted_tokens)
        return result

    def writer(answering: Answering) -> ChunkWriter:
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        writers.append(_TurnWriter(answering, keep, include_usage=include_usage))
        return writers[0]

    changing = ExitStack()
    changing.enter_context(session.changing())

    async def end() -> None:
        with changing:
            if body.keep_partial:
                try:
                    await to_thread.run_sync(writers[0].keep_partial)
                except ApiError as error:  # the stream has ended: no client can read it
                    log_of(http).failure(call_of(http.scope), error)

    def asked() -> GenerationRequest:
        generation = _request(http, session, body).generation()
        store_of(http).check_size(size_of(body.messages))
        return generation

    try:
        request = await to_thread.run_sync(asked)
        if body.stream:
            return _Ending(await stream_answer(http, request, writer, ends_in_thread=True), end)
        response = await whole_answer(http, request, collect)
    except BaseException:
        changing.close()
        raise
    changing.close()
    return response


def _request(http: Request, session: ServedSession, body: TurnRequest) -> TurnRequest:
    """The request with the session's messages.

    Raises:
        ApiError: a parameter does not go with the session.
    """
    if (body.n or 1) != 1 or body.continue_final_message:
        param = "continue_final_message" if body.continue_final_message else "n"
        raise ApiError(400, f"{param} does not go with sessions", param=param)
    if body.keep_partial and not body.stream:
        raise ApiError(400, "keep_partial needs stream: true", param="keep_partial")
    if body.model is not None and registry_of(http).find(body.model).name != session.model:
        raise ApiError(400, f"the session uses {session.model!r}: restore a dump with another model", param="model")
    messages = [*session.messages, *body.messages]
    if not messages or (not body.messages and messages[-1].role == "assistant"):
        raise ApiError(400, "there is no message to answer", param="messages")
    tools = body.tools or session.tools or None
    return body.model_copy(update={"model": session.model, "messages": messages, "tools": tools})


class _TurnWriter(ChunkWriter):
    """Writes the chunks of an answer, and keeps the answer when it is complete."""

    def __init__(
        self, answering: Answering, keep: Callable[[Answering, Choice | None, int], None], *, include_usage: bool
    ) -> None:
        super().__init__(answering, include_usage=include_usage)
        self._choice = Choice(0)
        self._keep = keep
        self._is_over = False

    def piece(self, piece: Piece) -> Iterable[bytes]:
        """One chunk."""
        self._choice.add(piece)
        return super().piece(piece)

    def end(self, outcomes: Sequence[Outcome], usage: TokenUsage) -> Iterable[bytes]:
        """The answer is complete."""
        self._keep(self._answering, self._choice, self._answering.shifted_tokens)
        self._is_over = True
        return super().end(outcomes, usage)

    def error(self, error: ApiError) -> Iterable[bytes]:
        """The answer failed, or the server has ended it."""
        self._is_over = error.code not in ENDED_BY_SERVER
        return super().error(error)

    def keep_partial(self) -> None:
        """Keep an answer that neither ended nor failed: the client is lost, or the server stops.

        Before its first token, it is left out.
        """
        if not self._is_over:
            self._keep(self._answering, self._choice if self._choice.parts else None, 0)


class _Ending(Response):
    """A response, and a function that is called after it, also if it fails."""

    def __init__(self, response: Response, after: Callable[[], Awaitable[None]]) -> None:
        self._response = response
        self.background = None
        self._after = after

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the response; see the ASGI specification."""
        try:
            await self._response(scope, receive, send)
        finally:
            with CancelScope(shield=True):
                await self._after()


def _message(choice: Choice) -> AssistantMessage:
    """An answer as a message. A call that it did not complete becomes text: without whole arguments it is invalid."""
    content = choice.content + "".join(call.name + call.arguments for call in choice.calls if not call.is_complete)
    calls = [call_shape(call.name, call.arguments, call.id) for call in choice.calls if call.is_complete]
    fields: dict[str, Any] = {"role": "assistant", "content": content}
    if choice.reasoning:
        fields["reasoning_content"] = choice.reasoning
    if calls:
        fields["tool_calls"] = calls
    return AssistantMessage.model_validate(fields)
