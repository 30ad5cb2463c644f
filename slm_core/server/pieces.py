"""Pieces of answers: every API streams them, or joins them for an answer that is not streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from slm_core.generation import Event, FinishReason
from slm_core.openai_shapes import finish_reason_name, new_call_id
from slm_core.types import CallArguments, CallEnd, CallStart, MalformedCall

Kind: TypeAlias = Literal["content", "reasoning", "call"]
"""The kind of a part of an answer."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a tool call.

    Attributes:
        index: the number of the call in the answer, from 0.
        arguments: text to add to the arguments, which are JSON.
        id: the call's id, in its first piece only.
        name: the tool, in its first piece only.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token with its log-probability and the likeliest tokens at its place, likeliest first."""

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of one answer; joined, its pieces are the answer.

    Attributes:
        index: the number of the answer.
        content: text to add to the content.
        reasoning: text to add to the reasoning.
        calls: pieces of tool calls, in order.
        logprobs: the token; None if log-probabilities were not requested, or the piece has no token.
        token: the token; None if tokens were not requested, or the piece has none.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    logprobs: TokenLogprobs | None = None
    token: int | None = None

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs) or self.token is not None

    def in_order(self) -> Iterator[tuple[Kind, str | CallPiece]]:
        """Its parts, as they follow each other: the rest of an open call, reasoning, content, new calls."""
        calls = list(self.calls)
        while calls and calls[0].id is None:
            yield "call", calls.pop(0)
        if self.reasoning:
            yield "reasoning", self.reasoning
        if self.content:
            yield "content", self.content
        for call in calls:
            yield "call", call


@dataclass(slots=True)
class JoinedCall:
    """A joined tool call; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are an object: an answer may end within them."""
        try:
            return isinstance(json.loads(self.arguments or "{}"), dict)
        except (ValueError, RecursionError):
            return False


@dataclass(slots=True)
class Part:
    """A joined part of an answer: a text, or a call."""

    kind: Kind
    text: str = ""
    call: JoinedCall | None = None


@dataclass(slots=True)
class Choice:
    """A joined answer.

    Attributes:
        index: its number.
        content, reasoning, calls: its parts by kind.
        parts: its parts in order.
        logprobs: its tokens, if log-probabilities were requested.
        tokens: its tokens, if they were requested.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    calls: list[JoinedCall] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        self._join(piece)
        for kind, part in piece.in_order():
            if isinstance(part, CallPiece):
                if part.id is not None:
                    self.parts.append(Part(kind, call=self.calls[part.index]))
                continue
            if not self.parts or self.parts[-1].kind != kind:
                self.parts.append(Part(kind))
            self.parts[-1].text += part

    def _join(self, piece: Piece) -> None:
        self.content += piece.content
        self.reasoning += piece.reasoning
        for call in piece.calls:
            if call.id is not None and call.name is not None:
                self.calls.append(JoinedCall(call.id, call.name))
            self.calls[call.index].arguments += call.arguments
        if piece.logprobs is not None:
            self.logprobs.append(piece.logprobs)
        if piece.token is not None:
            self.tokens.append(piece.token)


class PieceReader:
    """Turns the events of one answer into pieces.

    Every call gets an id. A malformed call that did not begin is content, so that no text of the model is lost.

    Args:
        index: the number of the answer.
        logprobs: whether pieces carry log-probabilities.
        tokens: whether pieces carry tokens.
        single_call: whether the answer ends after its first call.

    Attributes:
        n_calls: the number of calls so far.
        n_tokens: the number of tokens of the answer so far.
        n_reasoning: the number of tokens that gave text of the reasoning.
        over: whether the answer ended after its first call.
    """

    def __init__(self, index: int, *, logprobs: bool = False, tokens: bool = False, single_call: bool = False) -> None:
        self._index = index
        self._logprobs = logprobs
        self._tokens = tokens
        self._single_call = single_call
        self._numbers: dict[int, int] = {}
        self.n_tokens = 0
        self.n_reasoning = 0
        self.over = False

    @property
    def n_calls(self) -> int:
        """The number of calls so far."""
        return len(self._numbers)

    def read(self, event: Event) -> Piece:
        """The piece of an event."""
        if self.over:
            return Piece(self._index)
        content, calls = event.text, []
        self.n_tokens += event.token is not None
        self.n_reasoning += bool(event.reasoning and event.token is not None)
        for call in event.calls:
            if isinstance(call, CallStart):
                self._numbers[call.index] = number = len(self._numbers)
                calls.append(CallPiece(number, id=call.id or new_call_id(), name=call.name))
            elif isinstance(call, CallArguments):
                calls.append(CallPiece(self._numbers[call.index], call.text))
            elif self._ends(call):
                break
            elif isinstance(call.call, MalformedCall) and call.index not in self._numbers:
                content += call.call.text
        token = event.token if self._tokens else None
        return Piece(self._index, content, event.reasoning, tuple(calls), self._token_logprobs(event), token)

    def _ends(self, end: CallEnd) -> bool:
        self.over = self._single_call and not isinstance(end.call, MalformedCall)
        return self.over

    def _token_logprobs(self, event: Event) -> TokenLogprobs | None:
        if not self._logprobs or event.token is None:
            return None
        return TokenLogprobs(event.token, event.logprob, () if event.logprobs is None else event.logprobs.model)


def finish_reason(reason: FinishReason, reader: PieceReader) -> str:
    """Why an answer ended, in OpenAI's words: "stop", "length" or "tool_calls"."""
    return "tool_calls" if reader.over else finish_reason_name(reason, has_calls=reader.n_calls > 0)
