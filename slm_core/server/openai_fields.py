"""Parts that OpenAI's chat and text completions share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from slm_core.openai_shapes import SpelledToken, logprobs_shape, usage_shape
from slm_core.protocols import Vocab
from slm_core.server.answering import Answering, TokenUsage
from slm_core.server.errors import ApiError
from slm_core.server.fields import EngineFields, SamplingFields, Strict
from slm_core.server.pieces import TokenLogprobs

_NO_EFFECT = "Without effect."


class StreamOptions(Strict):
    """Options of streams."""

    include_usage: bool = Field(False, description="A last chunk has the numbers of tokens.")
    include_obfuscation: bool = Field(False, description=_NO_EFFECT)


class OpenAiFields(SamplingFields, EngineFields):
    """Fields of chat and text completions."""

    n: int | None = Field(None, ge=1, le=128, description="The number of answers; the prompt is computed once.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description=_NO_EFFECT)

    def check_stream(self) -> None:
        """Refuse options of streams without a stream.

        Raises:
            ApiError: there are some.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for streams: set stream to true", param="stream_options")


class Header:
    """What all objects of one answer have in common.

    Args:
        answering: the request.
        prefix: the prefix of the id.
        kind: the name of the objects.
    """

    def __init__(self, answering: Answering, prefix: str, kind: str) -> None:
        running = answering.running
        self._fields = {
            "id": f"{prefix}-{answering.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": running.name,
            "system_fingerprint": f"fp_{running.model.info.fingerprint[:12]}",
        }

    def with_choices(self, choices: Sequence[Mapping[str, object]], **others: object) -> Mapping[str, object]:
        """An object with these choices and other fields."""
        return {**self._fields, "choices": choices, **others}


def usage_json(usage: TokenUsage) -> Mapping[str, object]:
    """Numbers of tokens."""
    shape = usage_shape(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens)
    if usage.drafts is None:
        return shape
    accepted, rejected = usage.drafts
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    return {**shape, "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens, **details}}


def token_text(vocab: Vocab, token: int) -> str:
    """The text of a token; an incomplete UTF-8 sequence becomes U+FFFD."""
    return vocab.token_bytes(token, special=True).decode("utf-8", "replace")


def chat_logprobs(vocab: Vocab, tokens: Sequence[TokenLogprobs]) -> Mapping[str, Any]:
    """Log-probabilities in the form of chat completions."""

    def spelled(token: int, logprob: float) -> SpelledToken:
        return SpelledToken(token_text(vocab, token), logprob, vocab.token_bytes(token, special=True))

    return logprobs_shape(
        [(spelled(each.token, each.logprob), [spelled(*pair) for pair in each.top]) for each in tokens]
    )
