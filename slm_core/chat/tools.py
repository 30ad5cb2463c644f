"""A turn of a chat: the model answers; if it calls tools, the chat runs them, and the model answers again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import nan
from typing import Literal, Self, TypeAlias, get_args

from slm_core.argument_checks import checked_texts
from slm_core.chat.stream import AnswerStream
from slm_core.chat.toolbox import Toolbox
from slm_core.constraints import AfterThinking, NoToolCalls, Spec, ToolCalls
from slm_core.errors import InvalidOption, SessionError, ToolError
from slm_core.generation import Answer, Event, EventStream, FinishReason, StoppingCriterion
from slm_core.generation.control import callbacks
from slm_core.generation.events import Overflowed, Timings, ToolResult, Usage
from slm_core.protocols import Formatter
from slm_core.types import CallFormat, MalformedCall, Message, Role, ToolCall

ToolErrors: TypeAlias = Literal["tell", "raise"]
"""How invalid calls and raising tools are handled: as a message to the model, or as a ``ToolError``."""
Rules: TypeAlias = tuple[Spec | None, Spec | None]
CHOICES = ("auto", "none", "required")
_WHOLE = (FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.CONSTRAINT)
_NOTHING = Answer("", FinishReason.CANCELLED, (), Usage(0, 0, 0), Timings(0.0, 0.0))
"""The answer of a turn that was cancelled before its first answer."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the tools of a chat are used in one turn.

    Attributes:
        choice: "auto": the model decides; "none": it cannot call tools; "required": its first answer contains only
            calls; or the name of the tool that its first answer calls, in one block of calls.
        strict: enforce the schema of its tool in every call, also if ``choice`` is "auto".
        errors: see ``ToolErrors``.
        max_rounds: the number of answers whose calls are run; later calls are left to the caller.
        allowed: names of the tools that can be called, whose schemas are enforced; None for all tools.

    Raises:
        InvalidOption: an invalid value.
    """

    choice: str = "auto"
    strict: bool = False
    errors: ToolErrors = "tell"
    max_rounds: int = 8
    allowed: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.errors not in get_args(ToolErrors):
            raise InvalidOption(f"tool_errors={self.errors!r} (accepted: {', '.join(get_args(ToolErrors))})")
        if isinstance(self.max_rounds, bool) or not isinstance(self.max_rounds, int) or self.max_rounds < 0:
            raise InvalidOption(f"max_rounds={self.max_rounds!r} (accepted: 0 or more)")
        if not isinstance(self.strict, bool):
            raise InvalidOption(f"strict_tools={self.strict!r} (accepted: True, False)")
        if self.allowed is not None:
            object.__setattr__(self, "allowed", tuple(checked_texts("allowed_tools", self.allowed)))

    def rules(self, toolbox: Toolbox, formatter: Formatter, *, thinking: bool | None, continued: bool = False) -> Rules:
        """The constraints of a turn's first answer and of its later answers; None for no constraint.

        Args:
            toolbox: the tools.
            formatter: the chat format.
            thinking: the argument of ``Formatter.render``.
            continued: whether the first answer continues a message, whose reasoning is over.

        Raises:
            InvalidOption: an unknown choice, or a choice that cannot be enforced in this chat format.
            ConstraintError: a schema that cannot be enforced.
        """
        if self.choice == "auto" and not self.strict and self.allowed is None:
            return None, None
        callable_names = toolbox.names if self.allowed is None else self.allowed
        if self.choice not in (*CHOICES, *callable_names):
            raise InvalidOption(f"tool_choice={self.choice!r} (accepted: {', '.join((*CHOICES, *callable_names))})")
        if self.choice == "none":
            form = self._form(toolbox, formatter)
            return NoToolCalls(form), NoToolCalls(form)
        is_enforced = self.strict or self.allowed is not None
        free = self.calls(toolbox, formatter, required=False) if is_enforced else None
        if self.choice == "auto":
            return free, free
        forced = self.calls(toolbox, formatter)
        end = None if continued else formatter.reasoning_end(thinking=thinking)
        return forced if end is None else AfterThinking(forced, end), free

    def calls(self, toolbox: Toolbox, formatter: Formatter, *, required: bool = True) -> ToolCalls:
        """Calls of the tools that can be called; without ``required``, or free text.

        Raises:
            InvalidOption: a name in ``allowed`` is unknown, there are no tools, or their calls have no known grammar.
        """
        form, names = self._form(toolbox, formatter), self.allowed
        unknown = next((name for name in names or () if name not in toolbox.names), None)
        if unknown is not None or names == ():
            wrong = "is empty" if unknown is None else f"has {unknown!r}"
            raise InvalidOption(f"allowed_tools {wrong} (accepted: {', '.join(toolbox.names)})")
        if required and self.choice not in CHOICES:
            names, form = (self.choice,), replace(form, repeats=False)
        return ToolCalls(toolbox.enforced(names), form, required)

    def _form(self, toolbox: Toolbox, formatter: Formatter) -> CallFormat:
        form = formatter.call_format
        if not toolbox.schemas or form is None:
            why = f"no grammar of the calls of {formatter.name} is known" if toolbox.schemas else "there are no tools"
            raise InvalidOption(f"tool_choice={self.choice!r}, strict_tools={self.strict}: {why}")
        return form


@dataclass(frozen=True, slots=True)
class Turn:
    """The callbacks by which a turn changes its chat.

    Attributes:
        begin: starts the first answer of the turn, or a later one; called with whether it is the first, and with the
            seconds of all answers before it.
        add: adds messages to the chat.
        undo: undoes the turn.
        over: called at the end of the turn.
    """

    begin: Callable[[bool, float], AnswerStream]
    add: Callable[[Sequence[Message]], None]
    undo: Callable[[], None]
    over: Callable[[], None]


class RunningTurn(EventStream):
    """A turn that has begun; ``ChatStream`` is how callers read it."""

    def __init__(
        self,
        turn: Turn,
        toolbox: Toolbox,
        use: ToolUse,
        on_event: Callable[[Event], None] | None = None,
        pending: Sequence[ToolCall] = (),
    ) -> None:
        self._turn = turn
        self._toolbox = toolbox
        self._use = use
        self._on_event = on_event
        self._due = deque(pending)
        self._left: tuple[ToolCall, ...] = ()
        self._malformed: Sequence[MalformedCall] = ()
        self._ready: deque[ToolResult] = deque()
        self._results: list[ToolResult] = []
        self._rounds: list[Answer] = []
        self._answer: Answer | None = None
        self._running = self._steps = self._cancelled = False
        self._shown = True
        self._current: AnswerStream | None = None
        if not pending:
            self._current = self._begun()

    @property
    def answer(self) -> Answer:
        """The last answer, with the earlier rounds and the results of their calls.

        Raises:
            SessionError: the turn is not over yet.
        """
        if self._answer is not None:
            return self._answer
        if self._current is not None and not self._current.over:
            return self._current.answer
        raise SessionError("there is no answer yet, because tools have to run first: iterate the stream to its end")

    @property
    def over(self) -> bool:
        """Whether the turn is over."""
        return self._answer is not None

    @property
    def text(self) -> str:
        """The content so far of the current or last answer."""
        return "" if self._current is None else self._current.text

    @property
    def overflowed(self) -> Overflowed | None:
        """Messages dropped to make room for that answer, if any."""
        return None if self._current is None else self._current.overflowed

    def cancel(self) -> None:
        """Cancel the turn as soon as possible; the text so far becomes the answer. Any thread may call this."""
        self._cancelled = True
        if self._current is not None:
            self._current.cancel()

    def show_events(self, shown: bool) -> None:
        """Turn events on or off from now on."""
        self._shown = shown or self._on_event is not None
        if self._current is not None:
            self._current.show_events(self._shown)

    @property
    def paused(self) -> bool:
        """Whether a stopping criterion paused it."""
        return self._current is not None and self._current.paused

    def resume(
        self, stopping_criteria: Sequence[StoppingCriterion] | None = None, *, timeout: float | None = None
    ) -> Self:
        """Resume after a pause, as if there had been none. None keeps the stopping criteria or the timeout.

        New values apply to the paused answer, not to later answers of the turn.
        """
        if self._current is not None:
            self._current.resume(stopping_criteria, timeout=timeout)
        return self

    @property
    def cancelled(self) -> bool:
        """Whether the turn was cancelled."""
        return self._cancelled

    @property
    def runs_tools(self) -> bool:
        """Whether tools are running."""
        return self._running

    @property
    def steps(self) -> bool:
        """Whether a step computes an event: a call on the chat comes from a callback then."""
        return self._steps

    def end(self) -> None:
        """End the turn: the text so far becomes the answer."""
        self.cancel()
        self.resume()
        for _ in self:
            pass

    def undo(self) -> None:
        """Undo the turn, unless it is over."""
        if self._answer is None:
            self._turn.undo()

    def check_nothing_awaited(self) -> None:
        """Undo the turn and raise ``SessionError`` if a tool has to be awaited."""
        with self._all_or_nothing():
            self._check_nothing_awaited()

    def __next__(self) -> Event:
        if self._answer is not None or self.paused:
            raise StopIteration
        with self._all_or_nothing():
            if self._due and not self._cancelled:
                self._check_nothing_awaited()
                with self._tool_running():
                    self._ready.append(self._toolbox.run(self._due.popleft()))
            self._steps = True
            try:
                event = self._next_event()
            finally:
                self._steps = False
            if event is not None and self._on_event is not None:
                with callbacks:
                    self._on_event(event)
        if event is None:
            raise StopIteration
        return event

    async def arun_tools(self) -> None:
        """Run the calls that are due concurrently; the next events are their results."""
        if self._due and not self._cancelled and self._answer is None:
            with self._all_or_nothing(), self._tool_running():
                self._ready += await self._toolbox.arun_all(self._due)
                self._due.clear()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            self._cancelled = True  # the calls stay without results
            raise
        except BaseException:
            self._turn.undo()
            raise

    @contextmanager
    def _tool_running(self) -> Iterator[None]:
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def _check_nothing_awaited(self) -> None:
        awaited = self._toolbox.awaited
        if awaited:
            raise SessionError(f"the tool {awaited[0]!r} is to be awaited: use asend, or iterate with async for")

    def _next_event(self) -> Event | None:
        if self._ready:
            return Event(None, "", nan, result=self._take(self._ready.popleft()))
        if self._current is None or self._current.over:
            if self._cancelled:
                self._finish((*self._due, *self._left), FinishReason.CANCELLED)
                return None
            self._current = self._begun()
        event = next(self._current, None)
        if self._current.over:
            self._end_round(self._current.answer)
        return event

    def _begun(self) -> AnswerStream:
        """Start the next answer; the previous answer becomes a round."""
        first = self._current is None and not self._results
        if self._current is not None:
            self._rounds.append(self._current.answer)
        self._malformed = ()
        begun = self._turn.begin(first, sum(r.timings.prefill_s + r.timings.decode_s for r in self._rounds))
        begun.show_events(self._shown)
        return begun

    def _end_round(self, answer: Answer) -> None:
        """Handle a complete answer: queue its calls, or end the turn."""
        calls = answer.tool_calls if answer.finish_reason is FinishReason.TOOL_CALLS else ()
        malformed = answer.malformed_calls if answer.finish_reason in _WHOLE else ()
        at_limit = len(self._rounds) >= self._use.max_rounds
        if self._cancelled or at_limit or not self._toolbox.answers or not (calls or malformed):
            self._finish(answer.tool_calls, answer.finish_reason)
            return
        if malformed and self._use.errors == "raise":
            raise ToolError(f"a call is malformed: {malformed[0].reason}", malformed[0])
        self._malformed = malformed
        self._left = tuple(call for call in calls if self._toolbox.leaves(call))
        self._due.extend(call for call in calls if call not in self._left)
        if not self._due and self._left:
            self._finish(self._left, answer.finish_reason)
        elif not self._due:
            self._turn.add([Message(Role.USER, _complaint(malformed))])

    def _take(self, result: ToolResult) -> ToolResult:
        """Append a result as a message; after the last result, append messages about malformed calls."""
        if result.error is not None and self._use.errors == "raise":
            raise ToolError(f"{result.call.name}: {result.content}", result.call) from result.error
        self._results.append(result)
        last, content = not self._due and not self._ready, result.content
        if last and self._malformed:
            content += f"\n\n{_complaint(self._malformed)}"
        self._turn.add([Message(Role.TOOL, content, name=result.call.name, tool_call_id=result.call.id)])
        if last and self._left:
            self._finish(self._left, FinishReason.TOOL_CALLS)
        return result

    def _finish(self, calls: Sequence[ToolCall], reason: FinishReason) -> None:
        answer = _NOTHING if self._current is None else self._current.answer
        rounds, results = tuple(self._rounds), tuple(self._results)
        self._answer = replace(answer, tool_calls=tuple(calls), finish_reason=reason, rounds=rounds, results=results)
        self._turn.over()


def open_calls(messages: Sequence[Message]) -> tuple[ToolCall, ...]:
    """The calls at the end of a conversation that have no results yet."""
    answered = set()
    for message in reversed(messages):
        if message.role is not Role.TOOL:
            return tuple(call for call in message.tool_calls if call.id not in answered)
        answered.add(message.tool_call_id)
    return ()


def _complaint(malformed: Sequence[MalformedCall]) -> str:
    """Messages to the model about malformed calls."""
    return "\n".join(f"Error: a tool call could not be read: {call.reason}. It was not run." for call in malformed)
