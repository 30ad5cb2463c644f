"""One streaming answer of a chat, parsed by the chat format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from typing import Self

from slm_core.display import preview, signature
from slm_core.generation import Answer, Event, EventStream, FinishReason, Generation, StoppingCriterion
from slm_core.generation.events import Overflowed
from slm_core.protocols import StreamParser
from slm_core.types import AnswerDelta, Delta, Message, ToolCall

_COMPLETE = (FinishReason.STOP, FinishReason.CONSTRAINT)


class AnswerStream(EventStream):
    """A streaming answer as reasoning, content and tool calls.

    Args:
        generation: generates it.
        parser: parses it.
        finished: called with its message.
        n_calls: earlier tool calls of the chat: calls without ids from the model are numbered from here.
        overflowed: messages dropped to make room for it, if any.

    Attributes:
        text: its content so far.
    """

    def __init__(
        self,
        generation: Generation,
        parser: StreamParser,
        finished: Callable[[Message], None],
        n_calls: int,
        overflowed: Overflowed | None = None,
    ) -> None:
        self._generation = generation
        self._parser = parser
        self._finished = finished
        self._n_calls = n_calls
        self._answer: Answer | None = None
        self.text = ""
        self.overflowed = overflowed

    @property
    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            SessionError: the answer is not over yet.
        """
        return self._answer if self._answer is not None else self._generation.answer

    def __repr__(self) -> str:
        return signature(self, "over" if self.over else "paused" if self.paused else "running", preview(self.text))

    @property
    def over(self) -> bool:
        """Whether the answer is over."""
        return self._answer is not None

    def cancel(self) -> None:
        """Cancel the answer as soon as possible; the text so far becomes the answer. Any thread may call this."""
        self._generation.cancel()

    def show_events(self, shown: bool) -> None:
        """Turn events on or off from now on."""
        self._generation.show_events(shown)

    @property
    def paused(self) -> bool:
        """Whether a stopping criterion paused it."""
        return self._generation.paused

    def resume(
        self, stopping_criteria: Sequence[StoppingCriterion] | None = None, *, timeout: float | None = None
    ) -> Self:
        """Resume after a pause; None keeps the old value."""
        self._generation.resume(stopping_criteria, timeout=timeout)
        return self

    def __next__(self) -> Event:
        if self._answer is not None or self.paused:
            raise StopIteration
        event = next(self._generation, None)
        deltas = [] if event is None else self._parser.feed(event.text)
        if self._generation.finished:
            deltas += self._end()
        if event is None and not deltas:
            raise StopIteration
        event = separated(event, deltas)
        self.text += event.text
        return event

    def _end(self) -> list[AnswerDelta]:
        deltas, message = self._parser.finish()
        message = replace(message, tool_calls=_with_ids(message.tool_calls, self._n_calls))
        self._answer = replace(_answer_of(message, self._generation.answer), overflowed=self.overflowed)
        self._finished(message)
        return deltas


def parsed(raw: Answer, parser: StreamParser) -> Answer:
    """An answer that the chat format parses into content, reasoning, tool calls and malformed calls."""
    parser.feed(raw.text)
    return _answer_of(parser.finish()[1], raw)


def separated(event: Event | None, deltas: Sequence[AnswerDelta]) -> Event:
    """An event whose text is separated into content, reasoning and tool calls; None is the end of an answer."""
    return replace(
        Event(None, "", nan) if event is None else event,
        text=_joined(deltas, "content"),
        reasoning=_joined(deltas, "reasoning"),
        calls=tuple(delta for delta in deltas if not isinstance(delta, Delta)),
    )


def _answer_of(message: Message, raw: Answer) -> Answer:
    """The answer that a message was parsed from, with the parts of the message."""
    called = message.tool_calls and raw.finish_reason in _COMPLETE
    return replace(
        raw,
        text=message.content,
        reasoning=message.reasoning,
        tool_calls=message.tool_calls,
        malformed_calls=message.malformed_calls,
        finish_reason=FinishReason.TOOL_CALLS if called else raw.finish_reason,
    )


def _with_ids(calls: Sequence[ToolCall], n_before: int) -> tuple[ToolCall, ...]:
    """Calls with ids; missing ids become nine letters and digits, as Mistral's templates require."""
    return tuple(
        replace(call, id=f"call{(n_before + i) % 100_000:05}") if call.id is None else call
        for i, call in enumerate(calls)
    )


def _joined(deltas: Sequence[AnswerDelta], kind: str) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Delta) and delta.kind == kind)
