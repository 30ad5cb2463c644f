"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pydantic_core
from fastapi import APIRouter, Request
from starlette.responses import Response

from slm_core.server.answering import Answering, Outcome, TokenUsage
from slm_core.server.anthropic_fields import CountRequest, MessagesRequest
from slm_core.server.errors import ApiError, anthropic_envelope
from slm_core.server.large_bodies import LargeBodyRoute, off_loop
from slm_core.server.pieces import CallPiece, Choice, JoinedCall, Part, Piece
from slm_core.server.sse import STREAMED, answer, frame, json_response, registry_of

router = APIRouter(tags=["Anthropic"], route_class=LargeBodyRoute)


@router.post("/v1/messages", responses=STREAMED)
async def messages(body: MessagesRequest, http: Request) -> Response:
    """Answer a conversation."""

    def whole(answering: Answering, choices: Sequence[Choice]) -> Mapping[str, object]:
        (choice,), (outcome,) = choices, answering.outcomes
        ending = _ending(outcome, answering.usage, body.max_tokens)
        return _message(answering, [_block(part) for part in choice.parts], ending)

    writer = (lambda answering: EventWriter(answering, body.max_tokens)) if body.stream else None
    return await answer(http, await off_loop(http, body.generation), join=whole, writer=writer)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, http: Request) -> Response:
    """The number of tokens of a prompt."""
    conversation = await off_loop(http, body.conversation)
    async with registry_of(http).lease(body.model) as running:
        tokens = await running.tokens(conversation)
    return json_response({"input_tokens": len(tokens)})


class EventWriter:
    """Writes the events of a stream: each part of the answer is a content block.

    Args:
        answering: the request.
        max_tokens: the limit of the answer.
    """

    def __init__(self, answering: Answering, max_tokens: int) -> None:
        self._answering = answering
        self._max_tokens = max_tokens
        self._n_blocks = 0
        self._open: str | None = None

    def begin(self) -> Iterable[bytes]:
        """The message without content."""
        message = _message(self._answering, [], {"stop_reason": None, "stop_sequence": None})
        return [_event("message_start", message=message)]

    def piece(self, piece: Piece) -> Iterable[bytes]:
        """A delta of a block; a new block begins with its start, after the end of the block before."""
        for kind, part in piece.in_order():
            is_new_call = isinstance(part, CallPiece) and part.id is not None
            if self._open != kind or is_new_call:
                yield from self._close()
                yield self._begin(_block(_opening(part, kind)))
                self._open = kind
            if isinstance(part, CallPiece):
                if part.arguments:
                    yield self._delta("input_json_delta", partial_json=part.arguments)
            elif kind == "reasoning":
                yield self._delta("thinking_delta", thinking=part)
            else:
                yield self._delta("text_delta", text=part)

    def end(self, outcomes: Sequence[Outcome], usage: TokenUsage) -> Iterable[bytes]:
        """Why the answer ended, the usage, and the end."""
        yield from self._close()
        ending = _ending(outcomes[0], usage, self._max_tokens)
        yield _event("message_delta", delta=ending, usage=_usage(usage))
        yield _event("message_stop")

    def error(self, error: ApiError) -> Iterable[bytes]:
        """The error in place of the end."""
        return [frame(anthropic_envelope(error, self._answering.request_id), "error")]

    def _begin(self, block: Mapping[str, object]) -> bytes:
        self._n_blocks += 1
        return _event("content_block_start", index=self._n_blocks - 1, content_block=block)

    def _delta(self, kind: str, **fields: object) -> bytes:
        return _event("content_block_delta", index=self._n_blocks - 1, delta={"type": kind, **fields})

    def _close(self) -> Iterable[bytes]:
        if self._open is not None:
            self._open = None
            yield _event("content_block_stop", index=self._n_blocks - 1)


def _event(kind: str, **fields: object) -> bytes:
    return frame({"type": kind, **fields}, kind)


def _message(answering: Answering, content: Sequence[object], ending: Mapping[str, object]) -> Mapping[str, object]:
    return {
        "id": f"msg_{answering.request_id}",
        "type": "message",
        "role": "assistant",
        "model": answering.running.name,
        "content": content,
        **ending,
        "usage": _usage(answering.usage),
    }


def _opening(part: str | CallPiece, kind: str) -> Part:
    """The empty part that a piece begins."""
    if isinstance(part, CallPiece):
        return Part("call", call=JoinedCall(part.id or "", part.name or ""))
    return Part("reasoning" if kind == "reasoning" else "content")


def _block(part: Part) -> Mapping[str, object]:
    """A content block."""
    if part.call is not None:
        call = part.call
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _input(arguments: str) -> Mapping[str, object]:
    """The arguments of a call. If the answer ended within them, the complete part, as Anthropic's clients read it."""
    try:
        value = pydantic_core.from_json(arguments, allow_partial=True) if arguments else {}
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}


def _ending(outcome: Outcome, usage: TokenUsage, max_tokens: int) -> Mapping[str, object]:
    """Why an answer ended, in Anthropic's words."""
    if outcome.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": outcome.stop}
    if outcome.finish_reason == "length":
        is_full = usage.completion_tokens < max_tokens
        return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}
    reason = "tool_use" if outcome.finish_reason == "tool_calls" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: TokenUsage) -> Mapping[str, object]:
    """Numbers of tokens; ``input_tokens`` counts tokens that were not cached."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
