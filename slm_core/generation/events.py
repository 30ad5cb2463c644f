"""What a generation yields, and what it ends with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from slm_core.types import CallArguments, CallEnd, CallStart, EditLevel, MalformedCall, Message, ToolCall


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended it, a stop text appeared, or a stopping criterion called it complete."""
    LENGTH = "length"
    """``max_tokens`` was reached, or the context has no room for another token."""
    TOOL_CALLS = "tool_calls"
    """The model asks for tools."""
    CONSTRAINT = "constraint"
    """The constraint is complete: nothing may follow."""
    CANCELLED = "cancelled"
    """It was cancelled, its time was over (``Answer.timed_out``), or a stopping criterion ended it as incomplete."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities at one step, as ``Sampling.logprobs`` asks for them.

    Attributes:
        model: the likeliest tokens before sampling steps, likeliest first: (token, logprob).
        sampled: the same of what the token was drawn from, after all steps; () where it was not drawn.
        chosen: that of the token after all steps; nan where it was not drawn, -inf where the steps exclude it.
    """

    model: tuple[tuple[int, float], ...]
    sampled: tuple[tuple[int, float], ...] = ()
    chosen: float = math.nan


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What became of a tool call.

    Attributes:
        call: the call.
        content: what the model is told: the result, or what was wrong.
        error: what was raised; None where the tool returned.
    """

    call: ToolCall
    content: str
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a generation.

    Attributes:
        token: the token, or None where held-back text comes out at a cancelled end.
        text: new text; "" while a UTF-8 character or a possible stop text is incomplete.
        logprob: natural logarithm of the token's probability before sampling steps; nan where there is no token.
        reasoning: new text of the model's reasoning, where a chat format tells it apart.
        logprobs: the likeliest tokens, where ``Sampling.logprobs`` asks for them.
        calls: beginnings, arguments and ends of tool calls, where a chat format tells them apart.
        result: what a tool returned, where a chat ran it; such an event has no token and no text.
    """

    token: int | None
    text: str
    logprob: float
    reasoning: str = ""
    logprobs: Logprobs | None = None
    calls: tuple[CallStart | CallArguments | CallEnd, ...] = ()
    result: ToolResult | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of an answer.

    Attributes:
        prompt_tokens: tokens before the answer.
        cached_tokens: of those, tokens that did not have to be decoded again.
        completion_tokens: tokens of the answer.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that an answer took.

    Attributes:
        prefill_s: of the first step: decoding the prompt, and choosing the first token.
        decode_s: of the other steps; what the reader of the events did between them is not counted.
        queue_s: before the first step began.
        first_token_s: from asking for the answer to its first token, ``queue_s`` included; None where it has none.
    """

    prefill_s: float
    decode_s: float
    queue_s: float = 0.0
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What drafting did for an answer.

    Attributes:
        rounds: batches that held a draft.
        drafted: tokens of drafts that were decoded.
        accepted: those of them that were said.
        draft_s: seconds of drafting.
        verify_s: seconds of decoding batches that held a draft.
        switched_off: how often drafting stopped to pay.
        switched_on: how often it paid again.
        reason: why it is off now, or "".
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
        """The share of drafted tokens that were said; 0.0 where none were drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, slots=True)
class Overflowed:
    """What was dropped because the context had no room for it.

    Attributes:
        policy: the name of the policy.
        messages: the messages of a chat that are gone.
        summary: the message that took their place, if one did.
        n_tokens: tokens that the history became shorter by.
        level: CUT where they were cut out of the KV cache; TRUNCATE or REPLAY where what is kept is computed again.
    """

    policy: str
    messages: tuple[Message, ...]
    summary: Message | None
    n_tokens: int
    level: EditLevel


@dataclass(frozen=True, slots=True)
class Answer:
    """What a generation ended with.

    Attributes:
        text: the answer.
        finish_reason: why it ended.
        tokens: its tokens, with the one that ended it.
        usage: tokens counted.
        timings: seconds measured.
        timed_out: whether it was cancelled because its time was over.
        speculation: what drafting did for it, where there was any.
        reasoning: what the model thought first, where a chat format tells it apart.
        tool_calls: the calls it asks for; of those that a chat runs itself, only what it left to the caller.
        malformed_calls: what it has in place of further calls.
        overflowed: what was dropped to make room for it, where that had to be.
        rounds: the answers before it, whose calls a chat ran; each has its own tokens, usage and timings.
        results: what those calls came to.
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

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of the prompt decoded per second; 0.0 where all were cached, or no token was reached."""
        n, timings = self.usage.prompt_tokens - self.usage.cached_tokens, self.timings
        return n / timings.prefill_s if timings.first_token_s is not None and timings.prefill_s > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second; 0.0 where fewer than two were."""
        n = self.usage.completion_tokens - 1
        return n / self.timings.decode_s if n > 0 and self.timings.decode_s > 0 else 0.0
