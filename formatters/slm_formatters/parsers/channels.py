"""Answers of several messages, each with a header for its kind: reasoning, content or a call.

gpt-oss (the harmony format) writes
``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...``; other models write
``to=user<|message|>`` or ``>>>all`` instead of channels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slm_core.errors import TemplateError
from slm_core.types import CallFormat
from slm_formatters.parsers.answer import AnswerParser, CallBody
from slm_formatters.parsers.named_calls import JsonArguments
from slm_formatters.parsers.output import Output
from slm_formatters.parsers.python_tag import read_code
from slm_formatters.parsers.reader import Malformed, Markers, Reader, Steps
from slm_formatters.parsers.toolbox import Toolbox


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """The format of answers with headers.

    Attributes:
        name: the name of the format.
        start: opens a message; the prompt opens the first message.
        header_end: the text between header and body.
        ends: texts that close a message.
        opens: possible beginnings of a header at the start of an answer; if empty, every answer starts with a header.
        reasoning: a pattern in headers of reasoning.
        call: a pattern in headers of calls; its group ``name`` is the tool.
        body: the syntax of a call, including its name; None for JSON arguments of the tool in the header.
        framing: the texts before and after a body.
        code: tools whose body is code, not JSON: their only argument is ``code``.
        shown_by: texts in a prompt by which the format is detected.
    """

    name: str
    start: str
    header_end: str
    ends: tuple[str, ...]
    opens: tuple[str, ...]
    reasoning: re.Pattern[str]
    call: re.Pattern[str]
    body: CallBody | None = None
    framing: tuple[str, str] = ("", "")
    code: frozenset[str] = frozenset()
    shown_by: tuple[str, ...] = ()

    def parser(self, *, tools: Sequence[Mapping[str, object]] = (), in_reasoning: bool = False) -> AnswerParser:
        """A parser for one answer; set ``in_reasoning`` if the prompt opens a message of reasoning."""
        return AnswerParser(_Messages(self, Toolbox(tools), in_reasoning=in_reasoning))

    @property
    def call_format(self) -> CallFormat | None:
        """None: ``CallFormat`` cannot describe headers."""
        return None

    def reasoning_end(self, prompt_end: str) -> str | None:
        """The text that ends the reasoning message which a prompt with this end opens; None if it opens none."""
        header, separator, content = prompt_end.rpartition(self.start)[2].partition(self.header_end)
        return self.ends[0] if separator and not content and self.reasoning.search(header) else None

    def closes_reasoning(self, text: str) -> bool:
        """False: a message of reasoning is closed like any other."""
        return False

    def with_reasoning(self, begin: str, end: str) -> ChannelFormat:
        """Raise ``TemplateError``: headers mark reasoning."""
        raise TemplateError(f"the answer format {self.name!r} tells reasoning by headers, not by bounds")


class _Messages:
    def __init__(self, form: ChannelFormat, tools: Toolbox, *, in_reasoning: bool) -> None:
        self.reader = Reader()
        self.output = Output()
        self._form = form
        self._tools = tools
        self._in_reasoning = in_reasoning
        self._header_end = Markers([form.header_end])
        self._ends = Markers([form.start, *form.ends])

    def read(self) -> Steps[None]:
        if self._in_reasoning:
            yield from self._reasoning()
        elif (yield from self._begins_with_header()):
            yield from self._message()
        else:
            yield from self._content()
        while (yield from self.reader.next()):
            self.reader.restart()
            if (yield from self.reader.accept(self._form.start)):
                yield from self._message()
            else:
                yield from self._content()

    def _begins_with_header(self) -> Steps[bool]:
        space = yield from self.reader.space()
        for literal in self._form.opens:
            if (yield from self.reader.begins(literal)):
                return True
        if self._form.opens:
            self.output.content(space)
        return not self._form.opens

    def _message(self) -> Steps[None]:
        header: list[str] = []
        end = yield from self.reader.until(self._header_end, header.append)
        self.reader.take(self.reader.at + len(end))
        header_text = "".join(header)
        call = self._form.call.search(header_text)
        if self._form.reasoning.search(header_text):
            yield from self._reasoning()
        elif call is not None:
            yield from self._call(call["name"], in_text=bool(end))
        else:
            yield from self._content()

    def _reasoning(self) -> Steps[None]:
        self.output.open_reasoning()
        self._close((yield from self.reader.until(self._ends, self.output.reasoning)))

    def _content(self) -> Steps[None]:
        self.output.open_content()
        self._close((yield from self.reader.until(self._ends, self.output.content)))

    def _close(self, marker: str) -> None:
        """Read the end of a message, but not the start of the next one."""
        if marker:
            self.output.layout()
            self.reader.take(self.reader.at + (0 if marker == self._form.start else len(marker)))

    def _call(self, name: str, *, in_text: bool) -> Steps[None]:
        try:
            whole = in_text and (yield from self._body(name))
            if not whole and not (yield from self.reader.next()):
                raise Malformed("the answer ends within the call")
            after: list[str] = []
            yield from self.reader.until(self._ends, after.append)
            if "".join(after).strip():
                raise Malformed("text after the arguments")
            self.output.commit()
        except Malformed as error:
            yield from self.reader.until(self._ends, lambda _: None)
            self.output.malformed(self.reader.raw, str(error))
        self._close((yield from self.reader.until(self._ends, lambda _: None)))

    def _body(self, name: str) -> Steps[bool]:
        if self._form.body is not None:
            yield from self.reader.expect(self._form.framing[0])
            whole = yield from self._form.body.read(self.reader, self.output, self._tools)
            yield from self.reader.close(self._form.framing[1], whole=whole)
            return True
        self.output.start(name)
        if name in self._form.code and (yield from self.reader.next()) != "{":
            yield from read_code(self.reader, self.output, self._ends)
            return True
        return (yield from JsonArguments().read(self.reader, self.output, self._tools.parameters(name)))
