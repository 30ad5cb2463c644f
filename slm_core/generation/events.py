"""What a generation yields, and what it ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from slm_core.types import ToolCall


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended it, a stop text appeared, or a brake called it complete."""
    LENGTH = "length"
    """``max_tokens`` was reached, or the context has no room for another token."""
    TOOL_CALLS = "tool_calls"
    """The model asks for tools."""
    CONSTRAINT = "constraint"
    """The constraint is complete: nothing may follow."""
    CANCELLED = "cancelled"
    """Somebody cancelled it, or a brake stopped it as incomplete."""


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a generation.

    Attributes:
        token: the token, or None where held-back text comes out at a cancelled end.
        text: new text; "" while a UTF-8 character or a possible stop text is incomplete.
        logprob: natural logarithm of the token's probability before sampling steps; nan where there is no token.
        reasoning: new text of the model's reasoning, where a chat format tells it apart.
    """

    token: int | None
    text: str
    logprob: float
    reasoning: str = ""


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
        prefill_s: until the first token could be chosen.
        decode_s: from then on.
    """

    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What a generation ended with.

    Attributes:
        text: the answer.
        finish_reason: why it ended.
        tokens: its tokens, with the one that ended it.
        usage: tokens counted.
        timings: seconds measured.
        reasoning: what the model thought first, where a chat format tells it apart.
        tool_calls: the calls it asks for.
    """

    text: str
    finish_reason: FinishReason
    tokens: tuple[int, ...]
    usage: Usage
    timings: Timings
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = field(default=())

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second; 0.0 where fewer than two were."""
        n = self.usage.completion_tokens - 1
        return n / self.timings.decode_s if n > 0 and self.timings.decode_s > 0 else 0.0
