"""Prompts of requests: text, tokens, or messages in the model's chat format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import TypeAlias, TypeGuard, cast

from slm_core.argument_checks import check_flag, check_kind
from slm_core.chat.messages import MessageLike, as_messages
from slm_core.chat.prompt import encode_messages
from slm_core.chat.stream import parsed, separated
from slm_core.chat.toolbox import Toolbox, checked_tools
from slm_core.chat.tools import ToolUse
from slm_core.constraints import AfterThinking, AnyOf, Spec
from slm_core.errors import InvalidOption, InvalidToken
from slm_core.generation.events import Answer, Event
from slm_core.generation.infill import Infill
from slm_core.protocols import Constraint, Formatter, StreamParser, Vocab
from slm_core.sampling import Sampling
from slm_core.types import Message, Tool

Messages: TypeAlias = Sequence[MessageLike]
_RENDER_PARAMETERS = frozenset(signature(Formatter.render).parameters) - {"template_kwargs"}
"""Parameters of ``Formatter.render``: no variables of the template can be passed under these names."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with the tools and options of their answer. The caller runs the tools.

    Attributes:
        messages: the messages.
        tools: the tools that the model may call.
        tool_choice: "auto", "none", "required", or the name of the tool that the answer calls.
        strict_tools: enforce the schemas of the tools with "auto", too.
        allowed_tools: names of the tools that can be called, whose schemas are enforced; None for all tools. The model
            reads all tools.
        text_format: the constraint of an answer that calls no tools, after its reasoning; None for no constraint. The
            schemas of the tools are enforced, too.
        thinking: turn reasoning on or off; None uses the template's default.
        continue_final_message: leave the last message open, so that the answer continues it.
        template_kwargs: other variables of the template. Variables that the other attributes set, such as "messages",
            are refused.

    Raises:
        InvalidOption: invalid ``template_kwargs``, ``thinking`` or ``text_format``.
    """

    messages: Messages
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    strict_tools: bool = False
    allowed_tools: Sequence[str] | None = None
    text_format: Spec | None = None
    thinking: bool | None = None
    continue_final_message: bool = False
    template_kwargs: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_flag("thinking", self.thinking)
        check_kind("text_format", self.text_format, Spec)
        check_template_kwargs(self.template_kwargs, "template_kwargs")


Prompt: TypeAlias = str | Sequence[int] | Infill | Messages | Conversation
"""A text to continue, its tokens, a text with a gap, the messages of a conversation, or a conversation with tools."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as tokens, and how to parse its answer.

    Attributes:
        tokens: the tokens.
        formatter: the chat format of a conversation; None for a text to continue.
        thinking: the argument of ``Formatter.render``.
        message_ends: tokens up to the end of each message, in order; empty for a text.
        tools: the schemas of the tools.
        rule: the constraint of the tools' calls and of the text; None for no constraint.
        continued: whether the answer continues the content of the last message.
    """

    tokens: Sequence[int]
    formatter: Formatter | None = None
    thinking: bool | None = None
    message_ends: Sequence[int] = ()
    tools: Sequence[Mapping[str, object]] = ()
    rule: Spec | None = None
    continued: bool = False

    def sampling(self, sampling: Sampling) -> Sampling:
        """The options, with the stops of the chat format added."""
        if self.formatter is None or not self.formatter.stops:
            return sampling
        return replace(sampling, stop=(*sampling.stop, *self.formatter.stops))

    def read(self, answer: Answer) -> Answer:
        """The answer; for a conversation, separated into content, reasoning and tool calls."""
        parser = self.parser()
        return answer if parser is None else parsed(answer, parser)

    def parser(self) -> StreamParser | None:
        """A parser for an answer; None for a text to continue."""
        if self.formatter is None:
            return None
        parser = self.formatter.stream_parser(thinking=self.thinking, tools=self.tools)
        end = self.formatter.reasoning_end(thinking=self.thinking) if self.continued else None
        if end is not None:  # the prompt has content, so it has closed the reasoning
            parser.feed(end)
        return parser

    def constraint(self, constraint: Constraint | Spec | None) -> Constraint | Spec | None:
        """The constraint of the answer.

        Raises:
            InvalidOption: both the conversation and the caller restrict the answer.
        """
        if self.rule is not None and constraint is not None:
            raise InvalidOption(
                "constraint= does not go with the tool_choice, strict_tools, allowed_tools or text_format of a prompt"
            )
        return constraint if self.rule is None else self.rule


class EventParser:
    """Separates the text of a streaming answer's events into content, reasoning and tool calls.

    Args:
        parser: the chat format's parser; None leaves the events unchanged.
    """

    def __init__(self, parser: StreamParser | None) -> None:
        self._parser = parser

    def read(self, event: Event) -> Event:
        """The next event, with the text that is now certain."""
        return event if self._parser is None else separated(event, self._parser.feed(event.text))

    def end(self) -> Event | None:
        """An event without a token for the held-back rest of the answer; None if there is none."""
        parser, self._parser = self._parser, None
        deltas = [] if parser is None else parser.finish()[0]
        return separated(None, deltas) if deltas else None


def is_prompt(prompt: object) -> bool:
    """Whether ``prompt`` is one prompt (a text, tokens, messages, ...), not several."""
    return isinstance(prompt, str | Infill | Conversation) or (
        _is_list(prompt) and bool(prompt) and all(isinstance(p, int | Message | Mapping) for p in prompt)
    )


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Whether a value is a sequence, but not bytes: their numbers are not tokens."""
    return isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview)


def check_prompts(prompts: object) -> None:
    """Raise ``InvalidOption`` if ``prompts`` is not a list of prompts."""
    if not _is_list(prompts):
        raise InvalidOption(
            f"{type(prompts).__name__} is not a prompt (accepted: a text, tokens, messages, or a list of them)"
        )
    invalid = next((i for i, prompt in enumerate(prompts) if not is_prompt(prompt)), None)
    if invalid is not None:
        raise InvalidOption(
            f"prompt {invalid} is {prompts[invalid]!r:.80} (accepted: a text, a list of tokens, or a list of messages)"
        )


def check_template_kwargs(template_kwargs: object, option: str) -> None:
    """Raise ``InvalidOption`` if variables of a template are no mapping of names, or are set by other options.

    Args:
        template_kwargs: the variables.
        option: the option's name, for the error.
    """
    if not isinstance(template_kwargs, Mapping) or not all(isinstance(name, str) for name in template_kwargs):
        raise InvalidOption(f"{option}={template_kwargs!r:.80} (accepted: a mapping of names to values)")
    reserved = sorted(_RENDER_PARAMETERS & template_kwargs.keys())
    if reserved:
        raise InvalidOption(
            f"{option} has {reserved[0]!r} (accepted: names other than {', '.join(sorted(_RENDER_PARAMETERS))})"
        )


def encode(vocab: Vocab, formatter: Callable[[], Formatter], prompt: Prompt, thinking: bool | None) -> EncodedPrompt:
    """The tokens of a prompt. Control tokens in a text, or in the content of messages, are not parsed.

    Args:
        vocab: the model's vocabulary.
        formatter: returns its chat format; called only for messages.
        prompt: the prompt.
        thinking: turn reasoning on or off; None uses the template's default. Messages only.

    Raises:
        InvalidOption: not a prompt, or ``thinking`` with a text.
        InvalidToken: a token outside the vocabulary.
        TemplateError: there is no chat format, or it refuses the messages.
        VocabError: a text with a gap, and the vocabulary has no tokens for it.
    """
    if not is_prompt(prompt):
        raise InvalidOption(
            f"{prompt!r:.80} is not a prompt (accepted: a text, a list of tokens, or a list of messages)"
        )
    if isinstance(prompt, Conversation):
        if thinking is not None:
            raise InvalidOption("thinking= is an attribute of a Conversation: set it there")
        return _encode_conversation(vocab, formatter(), prompt)
    if isinstance(prompt, str | Infill) or all(isinstance(token, int) for token in prompt):
        if thinking is not None:
            raise InvalidOption("thinking= has an effect on messages only: a text is continued without a template")
        if isinstance(prompt, Infill):
            return EncodedPrompt(prompt.tokens(vocab))
        if isinstance(prompt, str):
            return EncodedPrompt(vocab.encode(prompt, add_special=True, parse_special=False))
        return EncodedPrompt(_checked(cast("Sequence[int]", prompt), vocab.size))
    return _encode_conversation(vocab, formatter(), Conversation(cast("Messages", prompt), thinking=thinking))


def _checked(tokens: Sequence[int], n_vocab: int) -> Sequence[int]:
    invalid = next((token for token in tokens if not 0 <= token < n_vocab), None)
    if invalid is not None:
        raise InvalidToken(f"token {invalid} (accepted: 0 to {n_vocab - 1})")
    return tokens


def _encode_conversation(vocab: Vocab, formatter: Formatter, conversation: Conversation) -> EncodedPrompt:
    thinking, toolbox = conversation.thinking, Toolbox(checked_tools(conversation.tools))
    rule = _rule(conversation, toolbox, formatter)
    segments = formatter.render(
        as_messages(conversation.messages),
        tools=toolbox.schemas,
        add_generation_prompt=not conversation.continue_final_message,
        continue_final_message=conversation.continue_final_message,
        thinking=thinking,
        **conversation.template_kwargs,
    )
    tokens, ends = encode_messages(vocab, segments)
    return EncodedPrompt(
        tokens, formatter, thinking, ends, toolbox.schemas, rule, continued=conversation.continue_final_message
    )


def _rule(conversation: Conversation, toolbox: Toolbox, formatter: Formatter) -> Spec | None:
    """The constraint of the answer; None for no constraint."""
    thinking, continued = conversation.thinking, conversation.continue_final_message
    use = ToolUse(conversation.tool_choice, conversation.strict_tools, allowed=conversation.allowed_tools)
    rule, _ = use.rules(toolbox, formatter, thinking=thinking, continued=continued)
    text = conversation.text_format
    if text is None or use.choice not in ("auto", "none"):
        return rule  # an answer that has to call tools has no text
    if use.choice == "auto" and toolbox.schemas:
        text = AnyOf((use.calls(toolbox, formatter), text))
    end = None if continued else formatter.reasoning_end(thinking=thinking)
    return text if end is None else AfterThinking(text, end)
