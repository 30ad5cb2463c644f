"""The parser of formats with markers in the text of an answer, for reasoning, content and calls.

A format is a declaration: its markers, and the syntax of calls between them.
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
    """The syntax of calls between their markers."""

    @property
    def first(self) -> str:
        """The possible first characters of a call."""
        ...

    def call_format(self, calls: CallSyntax | None) -> CallFormat | None:
        """The format of calls, for a grammar; ``calls`` are the markers, or None."""
        ...

    def read(self, reader: Reader, output: Output, tools: Toolbox) -> Steps[bool]:
        """Read one or more calls, committing all but the last one.

        Returns:
            Whether the last call is complete; otherwise the answer must not end here.

        Raises:
            Malformed: the text is not a call.
        """
        ...


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The syntax of calls with markers.

    Attributes:
        body: the syntax between the markers.
        begin: opens a call, or several calls of the body.
        end: closes ``begin``; "" if the body has its own end. White space in it and before it may vary.
        section: opens and closes all calls together; ("", "") for none.
    """

    body: CallBody
    begin: str
    end: str = ""
    section: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of a model's answers.

    Attributes:
        name: the name of the format.
        calls: the syntax of calls with markers, or None.
        bare: the syntax of calls without markers, instead of content; text that is not a call is content.
        reasoning: the markers that open and close reasoning, at the beginning of an answer or after a call.
        dropped: markers around content and at the end of turns, which are removed.
    """

    name: str
    calls: CallSyntax | None = None
    bare: CallBody | None = None
    reasoning: tuple[tuple[str, str], ...] = (THINK,)
    dropped: tuple[str, ...] = field(default=())

    @property
    def call_format(self) -> CallFormat | None:
        """The format of calls, for a grammar."""
        if self.bare is not None:
            return self.bare.call_format(None)
        return None if self.calls is None else self.calls.body.call_format(self.calls)

    def parser(self, *, tools: Sequence[Mapping[str, object]] = (), in_reasoning: bool = False) -> AnswerParser:
        """A parser for one answer; set ``in_reasoning`` if the prompt leaves reasoning open."""
        return AnswerParser(_Answer(self, Toolbox(tools), in_reasoning=in_reasoning))

    def reasoning_end(self, prompt_end: str) -> str | None:
        """The text that ends the reasoning which a prompt with this end leaves open; None if it leaves none open."""
        return next((end for begin, end in self.reasoning if prompt_end.rfind(begin) > prompt_end.rfind(end)), None)

    def closes_reasoning(self, text: str) -> bool:
        """Whether an answer closes reasoning that it did not open."""
        return any(begin not in text.partition(end)[0] for begin, end in self.reasoning if end in text)

    def with_reasoning(self, begin: str, end: str) -> AnswerFormat:
        """The same format with other reasoning markers."""
        if not begin or not end:
            raise TemplateError(f"reasoning between {begin!r} and {end!r} (accepted: two texts that are not empty)")
        dropped = tuple(marker for marker in self.dropped if marker not in begin + end)
        return replace(self, reasoning=((begin, end),), dropped=dropped)


class Reading(Protocol):
    """Reads an answer from beginning to end."""

    reader: Reader
    output: Output

    def read(self) -> Steps[None]:
        """Read the whole answer."""
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
        """Add a piece of the answer; returns the deltas that are now certain, in order.

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
        """End the answer; returns the last deltas, and the whole message.

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
        """Read blocks of reasoning, and then calls without markers, if any, before content."""
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
        """Read the opening of reasoning; returns its closing marker, or None if no reasoning opens here."""
        for begin, end in self._form.reasoning:
            if (yield from self.reader.accept(begin)):
                return end
            if not self._in_reasoning and (yield from self.reader.accept(end)):
                return ""  # the prompt has an empty block, and the answer closes it again
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
        """Whether the text ends, or continues with a marker that cannot be between calls."""
        for marker in (calls.section[0], *self._form.dropped):
            if (yield from self.reader.begins(marker)):
                return not calls.begin or not (yield from self.reader.begins(calls.begin))
        return not (yield from self.reader.peek())

    def _call(self, calls: CallSyntax, begin: str = "") -> Steps[None]:
        """Read one or more calls, and report malformed calls."""
        whole = False
        try:
            yield from self.reader.expect(begin)
            complete = yield from calls.body.read(self.reader, self.output, self._tools)
            yield from self.reader.close(calls.end, whole=complete)
            whole = True
            self.output.commit()
        except Malformed as error:
            if not self.output.in_call and not calls.section[0] and not _SIGNS.search(calls.begin):
                self.output.content(self.reader.raw)  # the marker is a plain word: here it was part of a sentence
                return
            if not whole:
                yield from self._skip()
            self.output.malformed(self.reader.raw, str(error))

    def _skip(self) -> Steps[None]:
        """Skip a malformed call, up to its end or to the next marker."""
        marker = yield from self.reader.until(self._resume, lambda _: None)
        if marker and marker == self._close:
            self.reader.take(self.reader.at + len(marker))

    def _bare(self, body: CallBody) -> Steps[None]:
        """Read calls without markers while the text continues like a call; other text is content."""
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
