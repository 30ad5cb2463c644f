"""The parser of all formats whose answers are text with markers in it: reasoning, content and calls between markers.

A format is a declaration: which markers open and close what, and how a call is written between them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from slm_core.errors import SessionError, TemplateError
from slm_core.types import AnswerDelta, CallFormat, Message
from slm_formatters.parsers.output import Output
from slm_formatters.parsers.reader import Malformed, Markers, Reader, Steps
from slm_formatters.parsers.toolbox import Toolbox

_SIGNS = re.compile(r"[<>\[\]{}|`]")
_SEPARATORS = re.compile(r"[\s,;]+")
THINK = ("<think>", "</think>")


class CallBody(Protocol):
    """How calls are written between their markers."""

    @property
    def first(self) -> str:
        """The characters that a call may begin with."""
        ...

    def call_format(self, calls: CallSyntax | None) -> CallFormat | None:
        """How calls are written, for a grammar; ``calls`` are the markers, None where there are none."""
        ...

    def read(self, reader: Reader, output: Output, tools: Toolbox) -> Steps[bool]:
        """Read one call or more, committing all but the last one.

        Returns:
            Whether the last one is whole as it is; else the end of the answer cannot be the end of the call.

        Raises:
            Malformed: this is no call.
        """
        ...


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Calls and their markers.

    Attributes:
        body: how a call is written.
        begin: opens a call, or several that the body separates.
        end: closes what ``begin`` opens, "" where the body tells its end; white space in it and before it is free.
        section: opens and closes all calls together, ("", "") where there is no such thing.
    """

    body: CallBody
    begin: str
    end: str = ""
    section: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers.

    Attributes:
        name: for people.
        calls: how it writes calls with markers, None where it does not.
        bare: how it writes calls without any, in place of content: what is no call is content then.
        reasoning: what opens and closes reasoning, at the beginning of an answer or after a call.
        dropped: markers around content, and at the end of turns.
    """

    name: str
    calls: CallSyntax | None = None
    bare: CallBody | None = None
    reasoning: tuple[tuple[str, str], ...] = (THINK,)
    dropped: tuple[str, ...] = field(default=())

    @property
    def call_format(self) -> CallFormat | None:
        """How calls are written, for a grammar."""
        if self.bare is not None:
            return self.bare.call_format(None)
        return None if self.calls is None else self.calls.body.call_format(self.calls)

    def parser(self, *, tools: Sequence[Mapping[str, object]] = (), in_reasoning: bool = False) -> AnswerParser:
        """A parser for one answer; ``in_reasoning`` where the prompt left reasoning open."""
        return AnswerParser(_Answer(self, Toolbox(tools), in_reasoning=in_reasoning))

    def reasoning_end(self, prompt_end: str) -> str | None:
        """What ends the reasoning that a prompt leaves open if it ends so; None if it does not."""
        return next((end for begin, end in self.reasoning if prompt_end.rfind(begin) > prompt_end.rfind(end)), None)

    def closes_reasoning(self, text: str) -> bool:
        """Whether an answer closes reasoning that it has not opened."""
        return any(begin not in text.partition(end)[0] for begin, end in self.reasoning if end in text)

    def with_reasoning(self, begin: str, end: str) -> AnswerFormat:
        """The same with other bounds of reasoning."""
        if not begin or not end:
            raise TemplateError(f"reasoning between {begin!r} and {end!r} (accepted: two texts that are not empty)")
        dropped = tuple(marker for marker in self.dropped if marker not in begin + end)
        return replace(self, reasoning=((begin, end),), dropped=dropped)


class Reading(Protocol):
    """What reads an answer from beginning to end."""

    reader: Reader
    output: Output

    def read(self) -> Steps[None]:
        """Read it all."""
        ...


class AnswerParser:
    """A ``protocols.StreamParser`` for one answer."""

    def __init__(self, reading: Reading) -> None:
        self._reader = reading.reader
        self._output = reading.output
        self._steps = reading.read()
        self._finished = False
        next(self._steps, None)

    def feed(self, text: str) -> list[AnswerDelta]:
        """Take a piece of the answer; returns what is now certain, in order.

        Raises:
            SessionError: after ``finish``.
        """
        if self._finished:
            raise SessionError("this answer is finished (make a new parser for the next one)")
        if text:
            self._reader.add(text)
            next(self._steps, None)
        return self._output.take()

    def finish(self) -> tuple[list[AnswerDelta], Message]:
        """The answer is over: what was held back, and the whole message.

        Raises:
            SessionError: called before.
        """
        self.feed("")
        self._finished = self._reader.final = True
        next(self._steps, None)
        message = self._output.end()
        return self._output.take(), message


class _Answer:
    def __init__(self, form: AnswerFormat, tools: Toolbox, *, in_reasoning: bool) -> None:
        self.reader = Reader()
        self.output = Output()
        self._form = form
        self._tools = tools
        self._in_reasoning = in_reasoning
        calls = form.calls
        self._openers = () if calls is None else tuple(text for text in (calls.section[0], calls.begin) if text)
        self._markers = Markers([*self._openers, *form.dropped])
        self._close = "" if calls is None or not calls.end else calls.end.split()[-1]
        self._resume = Markers([*self._markers.texts, self._close, "" if calls is None else calls.section[1]])

    def read(self) -> Steps[None]:
        yield from self._opening()
        while marker := (yield from self.reader.until(self._markers, self.output.content)):
            self.reader.restart()
            self.reader.take(self.reader.at + len(marker))
            if marker in self._openers:
                yield from self._calls(marker)
            else:
                self.output.layout()
            yield from self._opening()

    # Reasoning.

    def _opening(self) -> Steps[None]:
        """Blocks of reasoning, and then perhaps calls without markers, where content would begin."""
        reader = self.reader
        space = yield from reader.space()
        while (end := (yield from self._reasoning_opener())) is not None:
            yield from self._reasoning(end)
            yield from reader.space()
            space = ""
        self._in_reasoning = False
        self.output.content(space)
        if self._form.bare is not None and (yield from reader.peek()) in self._form.bare.first:
            yield from self._bare(self._form.bare)

    def _reasoning_opener(self) -> Steps[str | None]:
        """Read what opens reasoning; what will close it, None where none opens here."""
        for begin, end in self._form.reasoning:
            if (yield from self.reader.accept(begin)):
                return end
            if not self._in_reasoning and (yield from self.reader.accept(end)):
                return ""  # the prompt holds an empty block, and the answer closes it once more
        return self._form.reasoning[0][1] if self._in_reasoning else None

    def _reasoning(self, end: str) -> Steps[None]:
        self._in_reasoning = False
        self.output.open_reasoning()
        if end:
            marker = yield from self.reader.until(Markers([end]), self.output.reasoning)
            self.reader.take(self.reader.at + len(marker))
        self.output.layout()

    # Calls.

    def _calls(self, marker: str) -> Steps[None]:
        calls = self._form.calls
        assert calls is not None
        if marker != calls.section[0]:
            yield from self._call(calls)
            return
        while True:
            yield from self.reader.match(_SEPARATORS)
            self.reader.restart()
            if (yield from self.reader.accept(calls.section[1])) or (yield from self._leaves_section(calls)):
                return
            yield from self._call(calls, begin=calls.begin)

    def _leaves_section(self, calls: CallSyntax) -> Steps[bool]:
        """Whether the text ends, or goes on with a marker that has no place among calls."""
        for marker in (calls.section[0], *self._form.dropped):
            if (yield from self.reader.begins(marker)):
                return not calls.begin or not (yield from self.reader.begins(calls.begin))
        return not (yield from self.reader.peek())

    def _call(self, calls: CallSyntax, begin: str = "") -> Steps[None]:
        """Read one call or several, and report what turns out to be none."""
        whole = False
        try:
            yield from self.reader.expect(begin)
            complete = yield from calls.body.read(self.reader, self.output, self._tools)
            yield from self.reader.close(calls.end, whole=complete)
            whole = True
            self.output.commit()
        except Malformed as error:
            if not self.output.in_call and not calls.section[0] and not _SIGNS.search(calls.begin):
                self.output.content(self.reader.raw)  # a mere word opens calls here: this was one in a sentence
                return
            if not whole:
                yield from self._skip()
            self.output.malformed(self.reader.raw, str(error))

    def _skip(self) -> Steps[None]:
        """Read to the end of a call that is malformed, or up to what comes after it."""
        marker = yield from self.reader.until(self._resume, lambda _: None)
        if marker and marker == self._close:
            self.reader.take(self.reader.at + len(marker))

    def _bare(self, body: CallBody) -> Steps[None]:
        """Calls without markers, as long as the text goes on like one; else it is content."""
        self.reader.restart()
        try:
            yield from body.read(self.reader, self.output, self._tools)
            self.output.commit()
        except Malformed as error:
            if not self.output.in_call:
                self.output.content(self.reader.raw)
                return
            yield from self._skip()
            self.output.malformed(self.reader.raw, str(error))
