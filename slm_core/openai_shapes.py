"""The JSON shapes of OpenAI's chat completions, made of plain values; ``to_openai`` and the server write them."""

from __future__ import annotations

import math
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass

_ID_LETTERS = string.ascii_letters + string.digits
_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class SpelledToken:
    """A token of a list of log probabilities.

    Attributes:
        text: its text; an incomplete character is the replacement character.
        logprob: the natural logarithm of its probability.
        data: its bytes; None if they are unknown.
    """

    text: str
    logprob: float
    data: bytes | None = None


def new_call_id() -> str:
    """A random id of nine letters and digits, as Mistral's templates require."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


def finite(logprob: float) -> float:
    """A log probability for JSON."""
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


def call_shape(name: str, arguments: str, call_id: str | None) -> dict[str, object]:
    """A tool call; ``arguments`` is JSON text. A call without an id has no "id"."""
    call_id_field = {} if call_id is None else {"id": call_id}
    return {**call_id_field, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer_message(content: str, reasoning: str | None, calls: Sequence[dict[str, object]]) -> dict[str, object]:
    """The message of an answer. With tool calls, empty content is None."""
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": content or None, "tool_calls": list(calls)}
    return message


def choice_shape(index: int, message: dict[str, object], logprobs: object, finish_reason: str) -> dict[str, object]:
    """One of the answers to a request."""
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}


def finish_reason_name(reason: str, *, has_calls: bool) -> str:
    """Why an answer ended, as OpenAI names it.

    Args:
        reason: the value of a ``FinishReason``.
        has_calls: whether the answer has tool calls.

    Returns:
        "stop", "length" or "tool_calls"; an answer that was cancelled is incomplete: "length".
    """
    if reason in ("stop", "constraint"):
        return "tool_calls" if has_calls else "stop"
    return "length" if reason == "cancelled" else reason


def usage_shape(prompt: int, completion: int, cached: int, reasoning: int | None) -> dict[str, object]:
    """Numbers of tokens; None for an unknown number of reasoning tokens."""
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage


def logprobs_shape(tokens: Sequence[tuple[SpelledToken, Sequence[SpelledToken]]]) -> dict[str, object]:
    """The log probabilities of an answer.

    Args:
        tokens: each token of the answer with the likeliest tokens at its position.
    """
    content = [{**_entry(token), "top_logprobs": [_entry(each) for each in top]} for token, top in tokens]
    return {"content": content, "refusal": None}


def _entry(token: SpelledToken) -> dict[str, object]:
    data = None if token.data is None else list(token.data)
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": data}
