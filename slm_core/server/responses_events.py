"""A response while it is generated: its items, and the events that report them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from slm_core.sampling import Sampling
from slm_core.server.answering import Answering, Outcome, TokenUsage
from slm_core.server.errors import ApiError
from slm_core.server.fields import Strict
from slm_core.server.openai_fields import chat_logprobs
from slm_core.server.pieces import CallPiece, Kind, Piece, TokenLogprobs
from slm_core.server.responses_fields import ResponsesRequest
from slm_core.server.sse import frame

_EMPTY: Mapping[Kind, Mapping[str, Any]] = {
    "content": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}
"""The content part of an item that has no text yet."""
_EVENT_OF = {"content": "output_text", "reasoning": "reasoning_text"}
Json = dict[str, Any]


class ResponseWriter:
    """Collects the items of a response, and writes the events of its stream.

    The unstreamed response is the one in the last event.

    Args:
        response_id: its id.
        body: the request.

    Attributes:
        response: the response, which changes in place.
        on_end: called when the response is complete.
    """

    def __init__(self, response_id: str, body: ResponsesRequest) -> None:
        self._body = body
        self._vocab: Any = None
        self._tokens: list[TokenLogprobs] = []  # since the last text
        self._n_events = 0
        self._open: Kind | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.output: list[Json] = []
        self.response = _response(response_id, body)

    def start(self, answering: Answering) -> None:
        """Set the fields that are known once the request is submitted."""
        self._vocab = answering.running.model.vocab
        self.response |= {"model": answering.running.name, "status": "in_progress"}

    def begin(self) -> Iterable[bytes]:
        """The response without output."""
        return [self._event("response.created", response=self.response), self._progress()]

    def piece(self, piece: Piece) -> Iterable[bytes]:
        """A delta of an item; a new item begins after the end of the item before."""
        if piece.logprobs is not None and self._vocab.token_bytes(piece.logprobs.token, special=False):
            self._tokens.append(piece.logprobs)
        for kind, part in piece.in_order():
            is_new_call = isinstance(part, CallPiece) and part.id is not None
            if self._open != kind or is_new_call:
                yield from self._close("completed")
                yield from self._begin(kind, part)
            if isinstance(part, CallPiece):
                yield from self._add_arguments(part.arguments)
            else:
                yield self._add_text(kind, part)
            self._tokens.clear()

    def end(self, outcomes: Sequence[Outcome], usage: TokenUsage) -> Iterable[bytes]:
        """The end of the last item, and the whole response."""
        is_cut = outcomes[0].finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self._close(status)
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response |= {"status": status, "output": self.output, "usage": _usage(usage)}
        self.response["completed_at"] = None if is_cut else int(time.time())
        self.on_end()
        yield self._event(f"response.{status}", response=self.response)

    def error(self, error: ApiError) -> Iterable[bytes]:
        """The failed response, in place of the end."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}, "output": self.output}
        return [self._event("response.failed", response=self.response)]

    def cancel(self) -> Iterable[bytes]:
        """The cancelled response, in place of the end. OpenAI has no event for it."""
        self.response |= {"status": "cancelled", "output": self.output}
        return [self._event("response.incomplete", response=self.response)]

    def _progress(self) -> bytes:
        return self._event("response.in_progress", response=self.response)

    def _begin(self, kind: Kind, part: str | CallPiece) -> Iterable[bytes]:
        self._open = kind
        number = len(self.output)
        name = f"{self.response['id'].removeprefix('resp_')}_{number}"
        item: Json = {"status": "in_progress"}
        if isinstance(part, CallPiece):
            item |= {"id": f"fc_{name}", "type": "function_call", "call_id": part.id, "name": part.name}
            item["arguments"] = ""
        elif kind == "reasoning":
            item |= {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": []}
        else:
            item |= {"id": f"msg_{name}", "type": "message", "role": "assistant", "content": []}
        self.output.append(item)
        yield self._event("response.output_item.added", output_index=number, item=item)
        if kind != "call":
            empty = {name: list(value) if isinstance(value, list) else value for name, value in _EMPTY[kind].items()}
            item["content"] = [empty]
            yield self._event("response.content_part.added", **self._place(), part=empty)

    def _close(self, status: str) -> Iterable[bytes]:
        kind, self._open = self._open, None
        if kind is None:
            return
        item = self.output[-1]
        if kind == "call":
            place = {"output_index": len(self.output) - 1, "item_id": item["id"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **place, **done)
        else:
            (part,) = item["content"]
            place = self._place()
            logprobs = {"logprobs": part["logprobs"]} if kind == "content" else {}
            yield self._event(f"response.{_EVENT_OF[kind]}.done", **place, text=part["text"], **logprobs)
            yield self._event("response.content_part.done", **place, part=part)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _add_arguments(self, text: str) -> Iterable[bytes]:
        item = self.output[-1]
        item["arguments"] += text
        if text:
            place = {"output_index": len(self.output) - 1, "item_id": item["id"]}
            yield self._event("response.function_call_arguments.delta", **place, delta=text)

    def _add_text(self, kind: Kind, text: str) -> bytes:
        (part,) = self.output[-1]["content"]
        part["text"] += text
        fields: Json = {}
        if kind == "content":
            fields["logprobs"] = chat_logprobs(self._vocab, self._tokens)["content"]
            part["logprobs"] += fields["logprobs"]
        return self._event(f"response.{_EVENT_OF[kind]}.delta", **self._place(), delta=text, **fields)

    def _place(self) -> Json:
        return {"output_index": len(self.output) - 1, "content_index": 0, "item_id": self.output[-1]["id"]}

    def _event(self, kind: str, **fields: object) -> bytes:
        self._n_events += 1
        return frame({"type": kind, "sequence_number": self._n_events - 1, **fields}, kind)


def _response(response_id: str, body: ResponsesRequest) -> Json:
    """A response that has not begun."""
    tools = [
        {"type": "function", "description": None, "parameters": None, "strict": None, **tool.model_dump()}
        for tool in body.tools or ()
    ]
    choice, sampling = body.tool_choice, body.sampling(Sampling())
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "frequency_penalty": sampling.frequency_penalty,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": body.model or "",
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.is_stored,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
        "tool_choice": choice.model_dump() if isinstance(choice, Strict) else choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _usage(usage: TokenUsage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
