"""The events of a generation, and its answer."""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from slm_core.atomic_write import write_whole
from slm_core.display import changed_fields, count, preview, signature, table
from slm_core.display.blocks import Bubble, bubble
from slm_core.display.html import card
from slm_core.openai_shapes import (
    SpelledToken,
    answer_message,
    choice_shape,
    finish_reason_name,
    logprobs_shape,
    new_call_id,
    usage_shape,
)
from slm_core.types import CallArguments, CallEnd, CallStart, EditLevel, MalformedCall, Message, ToolCall


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended the answer, a stop text appeared, or a stopping criterion returned FINISH."""
    LENGTH = "length"
    """``max_tokens`` was reached, or the context has no room for another token."""
    TOOL_CALLS = "tool_calls"
    """The answer contains tool calls."""
    CONSTRAINT = "constraint"
    """The constraint is complete: no token may follow."""
    CANCELLED = "cancelled"
    """The answer was cancelled, reached its timeout (``Answer.timed_out``), or a stopping criterion returned STOP."""


@dataclass(frozen=True, slots=True, repr=False)
class Logprobs:
    """Log-probabilities (natural logarithms) at one step; ``Sampling.logprobs`` turns them on.

    Attributes:
        model: the likeliest tokens of the model, before sampling steps, likeliest first: (token, logprob).
        sampled: the likeliest tokens of the distribution after all sampling steps; () if the token was not drawn.
        chosen: the token's log-probability after all steps; nan if it was not drawn, -inf if the steps exclude it.
    """

    model: tuple[tuple[int, float], ...]
    sampled: tuple[tuple[int, float], ...] = ()
    chosen: float = math.nan

    def __repr__(self) -> str:
        return changed_fields(self)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token of an answer, under the model before sampling steps.

    Attributes:
        token: the token.
        text: its text, with control tokens as text; an incomplete character is the replacement character.
        logprob: natural logarithm of its probability, at most 0.
        top: the likeliest tokens at its position with their texts, likeliest first: (token, text, logprob).
    """

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...]


@dataclass(frozen=True, slots=True, repr=False)
class ToolResult:
    """The result of a tool call.

    Attributes:
        call: the call.
        content: the text for the model: the result, or a description of the error.
        error: the exception; None if the tool returned.
    """

    call: ToolCall
    content: str
    error: Exception | None = None

    def __repr__(self) -> str:
        return changed_fields(self)


@dataclass(frozen=True, slots=True, repr=False)
class Event:
    """One step of a generation.

    Attributes:
        token: the token; None if a cancelled answer ends with held-back text.
        text: new text; "" while a UTF-8 character or a possible stop text is incomplete.
        logprob: natural logarithm of the token's probability before sampling steps; nan without a token.
        reasoning: new text of the model's reasoning, if a chat format separates it.
        logprobs: the likeliest tokens, if ``Sampling.logprobs`` is set.
        calls: starts, arguments and ends of tool calls, if a chat format separates them.
        result: the result of a tool that a chat ran; this event has no token and no text.
    """

    token: int | None
    text: str
    logprob: float
    reasoning: str = ""
    logprobs: Logprobs | None = None
    calls: tuple[CallStart | CallArguments | CallEnd, ...] = ()
    result: ToolResult | None = None

    def __repr__(self) -> str:
        return changed_fields(self)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of an answer.

    Attributes:
        prompt_tokens: tokens before the answer.
        cached_tokens: prompt tokens that were cached.
        completion_tokens: tokens of the answer.
        shifted_tokens: cached tokens whose keys and values depend on tokens that an engine with ``reuse="cut"`` cut.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    shifted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of an answer, in seconds.

    Attributes:
        prefill_s: time of the first step: decoding the prompt, and choosing the first token.
        decode_s: time of the other steps, without the time of the events' reader.
        queue_s: time before the first step.
        first_token_s: time from the call to the first token, including ``queue_s``; None without a token.
    """

    prefill_s: float
    decode_s: float
    queue_s: float = 0.0
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Statistics of speculative decoding for an answer.

    Attributes:
        rounds: batches with a draft.
        drafted: draft tokens that were decoded.
        accepted: draft tokens that were accepted.
        draft_s: seconds of drafting.
        verify_s: seconds of decoding batches with a draft.
        switched_off: how often drafting was turned off, because it did not pay.
        switched_on: how often drafting was turned on again.
        reason: why drafting is off now, or "".
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    switched_off: int = 0
    switched_on: int = 0
    reason: str = ""

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that were accepted; 0.0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, slots=True)
class Overflowed:
    """Tokens that were dropped because the context was full.

    Attributes:
        policy: the name of the policy.
        messages: the messages of a chat that were dropped.
        summary: the message that replaced them; None for no summary.
        n_tokens: tokens by which the history became shorter.
        level: CUT if they were cut out of the KV cache; TRUNCATE or REPLAY if the later tokens are decoded again.
    """

    policy: str
    messages: tuple[Message, ...]
    summary: Message | None
    n_tokens: int
    level: EditLevel


@dataclass(frozen=True, slots=True, repr=False)
class Answer:
    """The result of a generation.

    Attributes:
        text: the answer.
        finish_reason: why it ended.
        tokens: its tokens, including the token that ended it.
        usage: numbers of tokens.
        timings: times.
        timed_out: whether it reached its timeout.
        speculation: statistics of speculative decoding; None without speculation.
        reasoning: the model's reasoning, if a chat format separates it.
        tool_calls: its tool calls; if a chat runs tools, only the calls that are left to the caller.
        malformed_calls: texts of calls that cannot be parsed.
        overflowed: the tokens that were dropped to make room, each time.
        rounds: the earlier answers whose tool calls a chat ran; each has its tokens, usage and timings.
        results: the results of these tool calls.
        logprobs: the log-probabilities of its tokens, in order, if ``Sampling.logprobs`` is set; None without it, and
            for an answer that was restored from a dump.
        stop: the stop text that ended it; None if none did.
    """

    text: str
    finish_reason: FinishReason
    tokens: tuple[int, ...]
    usage: Usage
    timings: Timings
    timed_out: bool = False
    speculation: SpeculationStats | None = None
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = field(default=())
    malformed_calls: Sequence[MalformedCall] = field(default=())
    overflowed: Overflowed | None = None
    rounds: Sequence[Answer] = field(default=())
    results: Sequence[ToolResult] = field(default=())
    logprobs: Sequence[TokenLogprob] | None = None
    stop: str | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the answer with its attributes to a JSON file, whole or not at all.

        Raises:
            InvalidOption: the file cannot be written.
        """
        text = json.dumps(asdict(self), ensure_ascii=False, indent=2, default=_as_json)
        write_whole(path, f"{text}\n".encode("utf-8", "replace"))

    def to_openai(self, model: str = "") -> dict[str, Any]:
        """The answer in the shape of OpenAI's chat completions ("chat.completion"), with a new id.

        A cancelled answer has the finish reason "length", an answer that its constraint ended has "stop". Texts of
        malformed calls follow the content. If there is reasoning, the usage has no number of its tokens: it is unknown.
        In log probabilities, the bytes of a token are None if it is an incomplete character.

        Args:
            model: the value of "model".
        """
        calls = [call if call.id is not None else replace(call, id=new_call_id()) for call in self.tool_calls]
        content = "".join((self.text, *(call.text for call in self.malformed_calls)))
        usage = self.usage
        reason = finish_reason_name(self.finish_reason, has_calls=bool(calls))
        message = answer_message(content, self.reasoning, [call.to_openai() for call in calls])
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [choice_shape(0, message, self._logprobs_shape(), reason)],
            "usage": usage_shape(
                usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, None if self.reasoning else 0
            ),
        }

    def _logprobs_shape(self) -> dict[str, object] | None:
        if self.logprobs is None:
            return None
        return logprobs_shape(
            [
                (_spelled(token.text, token.logprob), [_spelled(text, logprob) for _, text, logprob in token.top])
                for token in self.logprobs
            ]
        )

    def __repr__(self) -> str:
        calls, results = len(self.tool_calls) + len(self.malformed_calls), len(self.results)
        return signature(
            self,
            preview(self.text),
            self.finish_reason,
            count(len(self.tokens), "token"),
            count(len(self.reasoning), "character") + " of reasoning" if self.reasoning else "",
            count(calls, "tool call") if calls else "",
            count(results, "tool result") if results else "",
            "timed out" if self.timed_out else "",
        )

    def _repr_html_(self) -> str:
        calls = [repr(call) for call in (*self.tool_calls, *self.malformed_calls)]
        end = f"{self.finish_reason}, at its timeout" if self.timed_out else str(self.finish_reason)
        usage, speed = self.usage, f"{self.tokens_per_second:,.0f} tokens/s"
        rows = [
            ("end", end),
            ("prompt", f"{count(usage.prompt_tokens, 'token')}, {usage.cached_tokens:,} of them cached"),
            ("answer", f"{count(usage.completion_tokens, 'token')}, {speed}"),
            *((f"result of {result.call.name}", preview(result.content)) for result in self.results),
        ]
        return card("Answer", bubble(Bubble("assistant", self.text, self.reasoning or "", calls)), table(rows))

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens decoded per second; 0.0 if all were cached, or there is no answer token."""
        n, timings = self.usage.prompt_tokens - self.usage.cached_tokens, self.timings
        return n / timings.prefill_s if timings.first_token_s is not None and timings.prefill_s > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens decoded per second; 0.0 for fewer than two."""
        n = self.usage.completion_tokens - 1
        return n / self.timings.decode_s if n > 0 and self.timings.decode_s > 0 else 0.0


def _spelled(text: str, logprob: float) -> SpelledToken:
    return SpelledToken(text, logprob, None if "\N{REPLACEMENT CHARACTER}" in text else text.encode())


def _as_json(value: object) -> object:
    """Values that JSON lacks: a mapping that is not a dict, and the exception of a tool."""
    return dict(value) if isinstance(value, Mapping) else f"{type(value).__name__}: {value}"
