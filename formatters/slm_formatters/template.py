"""The formatter of a jinja template: renders messages to segments, and parses answers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from slm_core.errors import TemplateError
from slm_core.plugins import FormatterSource, registry
from slm_core.protocols import AnswerFormat, StreamParser
from slm_core.toolschema import tool_schemas
from slm_core.types import CallFormat, Message, Role, Segment, Tool
from slm_formatters.continuation import OpenEnd
from slm_formatters.jinja_template import JinjaTemplate
from slm_formatters.limits import Limits
from slm_formatters.messages import Arguments, MessageLike, as_mapping, has_calls, wanted_arguments
from slm_formatters.parsers.detection import detect
from slm_formatters.parsers.probing import ASKED
from slm_formatters.thinking import Switch, find_switches

_TOOL_TEMPLATE = "tool_use"
_Schemas: TypeAlias = Sequence[Mapping[str, object]]
_CALLS = CallFormat("<tool_call>", "</tool_call>", repeats=True)
_MOST_UNREAD, _LONGEST_UNREAD = 100, 80
"""The largest number of unread options that a formatter logs, and the number of characters of their names.

Names come from a server's clients: without a bound they would fill the memory and the log.
"""
_log = logging.getLogger(__name__)


class TemplateFormatter:
    """A ``protocols.Formatter`` that renders a jinja template, by default the model's.

    An additional template named "tool_use" replaces the main template if there are tools.

    Args:
        source: the model's templates and tokens, and the clock for templates.
        stops: texts that end an answer.
        name: the origin of the template; None for the origin in ``source``.
        limits: bounds on the template.

    Raises:
        TemplateError: the source has no template, or the template is not valid.
    """

    def __init__(
        self,
        source: FormatterSource,
        *,
        stops: Sequence[str] = (),
        name: str | None = None,
        limits: Limits = Limits(),  # noqa: B008  # immutable
    ) -> None:
        texts = {"": source.template} if source.template is not None else {}
        if _TOOL_TEMPLATE in source.templates:
            texts[_TOOL_TEMPLATE] = source.templates[_TOOL_TEMPLATE]
        if not texts:
            raise TemplateError("the model has no chat template of its own (name a chat format, such as 'chatml')")
        self._templates = {key: JinjaTemplate(text, limits) for key, text in texts.items()}
        self._template = next(iter(self._templates.values()))
        self._source = source
        self._name = source.origin if name is None else name
        self._stops = tuple(stops)
        self._reasoning_ends: dict[bool | None, str | None] = {}
        self._unread: set[str] = set()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._name}>"

    @property
    def name(self) -> str:
        """The origin of the format."""
        return self._name

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer, in addition to the vocabulary's EOG tokens."""
        return self._stops

    @property
    def parser(self) -> str:
        """The name of the answer format: detected from the template, or requested; "none" if calls are unknown.

        Raises:
            TemplateError: the requested parser does not exist.
        """
        return self._answers.name

    @property
    def call_format(self) -> CallFormat | None:
        """The format of tool calls, for a grammar."""
        return self._answers.call_format

    def reasoning_end(self, *, thinking: bool | None = None) -> str | None:
        """The text that ends the reasoning that the prompt opens; None if it opens none.

        Raises:
            TemplateError: the template has no ``thinking`` switch.
        """
        if thinking not in self._reasoning_ends:
            self._options(self._template, thinking, {})
            try:
                prompt = self.render([Message(Role.USER, ASKED)], thinking=thinking)
            except TemplateError:  # the template refuses this conversation: assume that answers open reasoning
                prompt = []
            end = "".join(segment.text for segment in prompt).rpartition(ASKED)[2]
            self._reasoning_ends[thinking] = self._answers.reasoning_end(end)
        return self._reasoning_ends[thinking]

    @property
    def reads_tools(self) -> bool:
        """Whether the template reads tools."""
        return any(template.reads("tools") for template in self._templates.values())

    def render(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        thinking: bool | None = None,
        **template_kwargs: object,
    ) -> list[Segment]:
        """Render messages to a prompt; see ``protocols.Formatter.render``.

        Raises:
            TemplateError: the template refuses, fails, has no ``thinking`` switch or cannot leave the last message
                open. Tools and options that it does not read give a warning in the log, not an error.
            InvalidOption: an object that is not a tool.
        """
        tools = tool_schemas(tools or ())
        template = self._template_for(tools)
        arguments_form = self._wanted_arguments if has_calls(messages) else Arguments.EITHER
        conversation: Sequence[Mapping[str, object]] = [as_mapping(message, arguments_form) for message in messages]
        options = self._options(template, thinking, template_kwargs)
        if thinking is not None:
            conversation = _with_word(conversation, self._switch(thinking).word)
        if tools and not self.reads_tools:
            self._warn("tools")
        if not continue_final_message:
            return self._render(template, conversation, tools, add_generation_prompt, options)
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        end = OpenEnd(conversation, field)
        return end.cut(self._render(template, end.messages, tools, False, options))

    def parse(self, text: str, *, tools: Sequence[Tool] = ()) -> Message:
        """Parse an answer into a message; if it closes reasoning that it did not open, the prompt opened it."""
        in_reasoning = self._answers.closes_reasoning(text) and (
            self.reasoning_end() is not None
            or (self._switches is not None and self.reasoning_end(thinking=True) is not None)
        )
        parser = self._answers.parser(tools=tool_schemas(tools), in_reasoning=in_reasoning)
        parser.feed(text)
        return parser.finish()[1]

    def stream_parser(self, *, thinking: bool | None = None, tools: Sequence[Tool] = ()) -> StreamParser:
        """A parser for one answer; ``thinking`` and ``tools`` as in ``render``.

        Raises:
            TemplateError: the template has no ``thinking`` switch.
        """
        return self._answers.parser(
            tools=tool_schemas(tools), in_reasoning=self.reasoning_end(thinking=thinking) is not None
        )

    def _template_for(self, tools: _Schemas) -> JinjaTemplate:
        return self._templates.get(_TOOL_TEMPLATE, self._template) if tools else self._template

    def _render(
        self,
        template: JinjaTemplate,
        messages: Sequence[Mapping[str, object]],
        tools: _Schemas,
        add_generation_prompt: bool,
        options: Mapping[str, object],
    ) -> list[Segment]:
        source = self._source
        return template.render(
            messages,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            tokens={**source.tokens, "bos_token": source.bos_token, "eos_token": source.eos_token},
            now=source.now,
            options=options,
        )

    def _options(
        self, template: JinjaTemplate, thinking: bool | None, template_kwargs: Mapping[str, object]
    ) -> dict[str, object]:
        """The template's variables besides messages; logs a warning for unknown ones."""
        for name in sorted(template_kwargs.keys() - template.options - {"documents"}):
            self._warn(name, template.options)
        switch_options = {} if thinking is None else self._switch(thinking).options
        twice = sorted(switch_options.keys() & template_kwargs.keys())
        if twice:
            raise TemplateError(f"thinking and {twice[0]} are the same option of this chat template: give one")
        return {**template_kwargs, **switch_options}

    def _warn(self, name: str, accepted: frozenset[str] = frozenset()) -> None:
        """Log once that the template does not read an option. It is not an error: templates of other models do."""
        short_name = name[:_LONGEST_UNREAD]
        if short_name not in self._unread and len(self._unread) < _MOST_UNREAD:
            self._unread.add(short_name)
            accepted_text = f" (it reads: {', '.join(sorted(accepted)) or 'no options'})" if name != "tools" else ""
            _log.warning("the chat template does not read %.80r%s", short_name, accepted_text)

    @functools.cached_property
    def _answers(self) -> AnswerFormat:
        def render(messages: Sequence[Mapping[str, object]], tools: _Schemas, opens_answer: bool) -> str:
            segments = self._render(self._template_for(tools), messages, tools, opens_answer, {})
            return "".join(segment.text for segment in segments)

        source, parser_name = self._source, self._source.parser
        text = source.templates.get(_TOOL_TEMPLATE, "") + (source.template or "")
        answer_format = detect(render, text) if parser_name is None else registry().answer_format(parser_name)
        return answer_format if source.reasoning is None else answer_format.with_reasoning(*source.reasoning)

    @functools.cached_property
    def _wanted_arguments(self) -> Arguments:
        def render(messages: Sequence[Mapping[str, object]], tools: _Schemas | None) -> str:
            segments = self._render(self._template_for(tools or ()), messages, tools or (), False, {})
            return "".join(segment.text for segment in segments)

        return wanted_arguments(render)

    @functools.cached_property
    def _switches(self) -> tuple[Switch, Switch] | None:
        def render(content: str, options: Mapping[str, object]) -> str | None:
            try:
                segments = self._render(self._template, [{"role": "user", "content": content}], (), True, options)
            except TemplateError:  # the template refuses these options
                return None
            return "".join(segment.text for segment in segments)

        return find_switches(self._template.options, self._template.constants, render)

    def _switch(self, thinking: bool) -> Switch:
        if self._switches is None:
            raise TemplateError("the chat template cannot be asked for reasoning or for none")
        return self._switches[0] if thinking else self._switches[1]


def _with_word(messages: Sequence[Mapping[str, object]], word: str) -> Sequence[Mapping[str, object]]:
    """The messages with a word added to the last user message."""
    last = max((i for i, message in enumerate(messages) if message.get("role") == Role.USER), default=None)
    if not word or last is None:
        return messages
    request = messages[last]
    if not isinstance(request.get("content"), str):
        raise TemplateError("the chat template takes the wish for reasoning from a text, not from parts of content")
    return [*messages[:last], {**request, "content": f"{request['content']}{word}"}, *messages[last + 1 :]]
