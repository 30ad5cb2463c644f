"""The formatter around a jinja template: messages in, segments out, and answers read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from slm_core.errors import TemplateError
from slm_core.plugins import FormatterSource
from slm_core.protocols import StreamParser
from slm_core.types import Message, Role, Segment, ToolCall
from slm_formatters.jinja_template import JinjaTemplate
from slm_formatters.limits import Limits
from slm_formatters.parsers import hermes

_THINKING_SWITCHES = ("enable_thinking", "thinking")


class TemplateFormatter:
    """A ``protocols.Formatter`` that renders a jinja template, by default the model's own.

    Args:
        source: the model's template and tokens.
        name: where the template comes from.
        stops: texts that end an answer.
        now: what ``strftime_now`` tells the template, None for the real time.
        limits: bounds on the template.

    Raises:
        TemplateError: the source has no template, or the template is not valid.
    """

    def __init__(
        self,
        source: FormatterSource,
        *,
        name: str = "template of the model file",
        stops: Sequence[str] = (),
        now: datetime | None = None,
        limits: Limits = Limits(),  # noqa: B008  # immutable
    ) -> None:
        if source.template is None:
            raise TemplateError("the model has no chat template of its own (name a chat format, such as 'chatml')")
        self._template = JinjaTemplate(source.template, limits)
        self._bos_token, self._eos_token = source.bos_token, source.eos_token
        self._name = name
        self._stops = tuple(stops)
        self._now = now
        self._reasoning_opened: dict[bool | None, bool] = {}

    @property
    def name(self) -> str:
        """Where the format came from."""
        return self._name

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer, besides the vocabulary's EOG tokens."""
        return self._stops

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        **template_kwargs: object,
    ) -> list[Segment]:
        """Turn messages into a prompt; see ``protocols.Formatter.render``.

        Raises:
            TemplateError: also where the template has no place for tools, or does not read one of ``template_kwargs``.
        """
        if tools and not self._template.reads("tools"):
            raise TemplateError("the chat template has no place for tools")
        return self._template.render(
            [_as_mapping(message) for message in messages],
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._bos_token,
            eos_token=self._eos_token,
            now=self._now,
            options=self._options(thinking, template_kwargs),
        )

    def parse(self, text: str) -> Message:
        """Turn an answer into a message; an unopened ``</think>`` ends reasoning that the prompt began."""
        can_ask = any(self._template.reads(switch) for switch in _THINKING_SWITCHES)
        may_be_in_reasoning = self._opens_reasoning(None) or (can_ask and self._opens_reasoning(True))
        return hermes.parse(text, may_be_in_reasoning=may_be_in_reasoning)

    def stream_parser(self, *, thinking: bool | None = None) -> StreamParser:
        """A parser for one answer; ``thinking`` as given to ``render``.

        Raises:
            TemplateError: the template does not understand ``thinking``.
        """
        return hermes.HermesParser(in_reasoning=self._opens_reasoning(thinking))

    def _options(self, thinking: bool | None, template_kwargs: Mapping[str, object]) -> dict[str, object]:
        accepted = self._template.options
        unread = sorted(template_kwargs.keys() - accepted - {"documents"})
        if unread:
            known = ", ".join(sorted(accepted)) or "none"
            raise TemplateError(f"the chat template does not read {', '.join(unread)} (it reads: {known})")
        options = dict(template_kwargs)
        if thinking is not None:
            switch = self._thinking_switch()
            if switch in options:
                raise TemplateError(f"thinking and {switch} are the same option of this chat template: give one")
            options[switch] = thinking
        return options

    def _thinking_switch(self) -> str:
        for switch in _THINKING_SWITCHES:
            if self._template.reads(switch):
                return switch
        names = " or ".join(_THINKING_SWITCHES)
        raise TemplateError(f"the chat template cannot be asked for reasoning or for none (it does not read {names})")

    def _opens_reasoning(self, thinking: bool | None) -> bool:
        """Whether prompts end with an opening tag, so that answers begin with what the model thinks."""
        if thinking not in self._reasoning_opened:
            self._options(thinking, {})
            try:
                prompt = self.render([Message(Role.USER, "x")], thinking=thinking)
            except TemplateError:  # a template that refuses this conversation; reasoning must then be opened in answers
                prompt = []
            self._reasoning_opened[thinking] = hermes.opens_reasoning(prompt)
        return self._reasoning_opened[thinking]


def _as_mapping(message: Message) -> dict[str, object]:
    """A message as templates expect it: keys that it does not have are absent."""
    fields: dict[str, object] = {"role": message.role.value, "content": message.content}
    if message.reasoning is not None:
        fields["reasoning_content"] = fields["thinking"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [_call_as_mapping(call) for call in message.tool_calls]
    optional = {"name": message.name, "tool_call_id": message.tool_call_id}
    return fields | {name: value for name, value in optional.items() if value is not None}


def _call_as_mapping(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    identity = {} if call.id is None else {"id": call.id}
    return {"type": "function", **identity, "function": function}
