"""Ollama's chats: POST /api/chat and /api/generate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

from fastapi import APIRouter, Request
from starlette.responses import Response

from slm_core.openai_shapes import finite
from slm_core.server.answering import Answering, Outcome, TokenUsage
from slm_core.server.errors import ApiError, ollama_envelope
from slm_core.server.json_text import encoded
from slm_core.server.large_bodies import LargeBodyRoute, off_loop
from slm_core.server.ollama_fields import ChatRequest, GenerateRequest, OllamaFields
from slm_core.server.openai_fields import token_text
from slm_core.server.pieces import CallPiece, Choice, JoinedCall, Piece, TokenLogprobs
from slm_core.server.requests import GenerationRequest
from slm_core.server.sse import LINED, LINES, answer, json_response, registry_of

router = APIRouter(tags=["Ollama"], route_class=LargeBodyRoute)
Fields = Mapping[str, object]


class _Form(Protocol):
    """How an endpoint puts a part of an answer into its JSON."""

    def __call__(self, content: str = "", thinking: str = "", calls: Sequence[Fields] = ()) -> Fields: ...


@router.post("/api/chat", responses=LINED)
async def chat(body: ChatRequest, http: Request) -> Response:
    """Answer a conversation."""
    return await _answer(http, body, body.generation if body.messages else None, _message)


@router.post("/api/generate", responses=LINED)
async def generate(body: GenerateRequest, http: Request) -> Response:
    """Answer one prompt, or continue a text."""
    return await _answer(http, body, body.generation if body.prompt or body.suffix else None, _response)


async def _answer(
    http: Request, body: OllamaFields, request: Callable[[int], GenerationRequest] | None, form: _Form
) -> Response:
    """The answer to a request; without one, the model is loaded, or unloaded if ``keep_alive`` is 0."""
    registry = registry_of(http)
    entry = registry.find(body.model_name)
    if request is None and body.unloads:
        await registry.unload(body.model_name)
        return json_response({**_header(entry.name), **form(), "done": True, "done_reason": "unload"})
    if request is None:
        async with registry.lease(body.model_name):
            return json_response({**_header(entry.name), **form(), "done": True, "done_reason": "load"})

    def whole(answering: Answering, choices: Sequence[Choice]) -> Fields:
        (choice,) = choices
        calls, rest = _complete(choice.calls)
        fields: dict[str, object] = {**_header(entry.name), **form(choice.content + rest, choice.reasoning, calls)}
        if answering.has_logprobs:
            fields["logprobs"] = _logprobs(answering, choice.logprobs)
        return {**fields, **_ending(answering)}

    writer = (lambda answering: LineWriter(answering, entry.name, form)) if body.stream else None
    make, n_ctx = request, entry.served.settings.n_ctx
    asked = await off_loop(http, lambda: make(n_ctx))
    return await answer(http, asked, join=whole, writer=writer, media_type=LINES)


class LineWriter:
    """Writes the lines of a stream. A tool call is written when it is complete.

    Args:
        answering: the request.
        model: the name of the model.
        form: how the endpoint writes a part of an answer.
    """

    def __init__(self, answering: Answering, model: str, form: _Form) -> None:
        self._answering = answering
        self._model = model
        self._form = form
        self._calls: list[JoinedCall] = []

    def begin(self) -> Iterable[bytes]:
        """No frames."""
        return ()

    def piece(self, piece: Piece) -> Iterable[bytes]:
        """A line with the texts of the piece, after the calls that they end."""
        logprobs = [] if piece.logprobs is None else [piece.logprobs]
        for kind, part in piece.in_order():
            if isinstance(part, CallPiece):
                if part.id is not None:
                    yield from self._write_calls()
                    self._calls.append(JoinedCall(part.id, part.name or ""))
                self._calls[-1].arguments += part.arguments
                continue
            yield from self._write_calls()
            yield self._line(self._form(thinking=part) if kind == "reasoning" else self._form(part), logprobs)
            logprobs = []
        if logprobs:
            yield self._line(self._form(), logprobs)

    def end(self, outcomes: Sequence[Outcome], usage: TokenUsage) -> Iterable[bytes]:
        """The last call, why the answer ended, and the usage."""
        yield from self._write_calls()
        yield self._line({**self._form(), **_ending(self._answering)})

    def error(self, error: ApiError) -> Iterable[bytes]:
        """The error in place of the end."""
        return [encoded(ollama_envelope(error, "")) + b"\n"]

    def _write_calls(self) -> Iterable[bytes]:
        calls, self._calls = self._calls, []
        if calls:
            complete, rest = _complete(calls)
            yield self._line(self._form(rest, calls=complete))

    def _line(self, fields: Fields, logprobs: Sequence[TokenLogprobs] = ()) -> bytes:
        line: dict[str, object] = {**_header(self._model), "done": False, **fields}
        if logprobs:
            line["logprobs"] = _logprobs(self._answering, logprobs)
        return encoded(line) + b"\n"


def _message(content: str = "", thinking: str = "", calls: Sequence[Fields] = ()) -> Fields:
    """A part of an answer in a chat."""
    message: dict[str, object] = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def _response(content: str = "", thinking: str = "", calls: Sequence[Fields] = ()) -> Fields:
    """A part of an answer to a prompt, which has no tools."""
    return {"response": content, **({"thinking": thinking} if thinking else {})}


def _header(model: str) -> dict[str, object]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat()}


def _complete(calls: Sequence[JoinedCall]) -> tuple[list[Fields], str]:
    """Calls with their arguments as objects, and the text of a call within which the answer ended.

    A client runs the calls that it gets: it must not get half of one.
    """
    complete: list[Fields] = []
    rest = ""
    for call in calls:
        if call.is_complete:
            complete.append({"function": {"name": call.name, "arguments": json.loads(call.arguments or "{}")}})
        else:
            rest += call.name + call.arguments
    return complete, rest


def _logprobs(answering: Answering, tokens: Sequence[TokenLogprobs]) -> list[Fields]:
    vocab = answering.running.model.vocab

    def entry(token: int, logprob: float) -> dict[str, object]:
        return {"token": token_text(vocab, token), "logprob": finite(logprob)}

    return [{**entry(each.token, each.logprob), "top_logprobs": [entry(*pair) for pair in each.top]} for each in tokens]


def _ending(answering: Answering) -> Fields:
    """Why an answer ended, and its tokens and times."""
    reason = "length" if answering.outcomes[0].finish_reason == "length" else "stop"
    usage, metrics = answering.usage, answering.metrics
    return {
        "done": True,
        "done_reason": reason,
        "total_duration": nanoseconds((metrics.total_s or 0.0) + answering.load_s),
        "load_duration": nanoseconds(answering.load_s),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": nanoseconds(metrics.prefill_s),
        "eval_count": usage.completion_tokens,
        "eval_duration": nanoseconds(metrics.decode_s),
    }


def nanoseconds(seconds: float | None) -> int:
    """A duration in Ollama's unit."""
    return round((seconds or 0.0) * 1e9)
