"""Prompts of requests: text, tokens, or messages in the model's chat format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

from slm_core.chat.messages import MessageLike, as_messages
from slm_core.chat.prompt import encode_messages
from slm_core.chat.stream import parsed
from slm_core.errors import InvalidOption
from slm_core.generation.events import Answer
from slm_core.protocols import Formatter, Vocab
from slm_core.sampling import Sampling
from slm_core.types import Message

Messages: TypeAlias = Sequence[MessageLike]
Prompt: TypeAlias = str | Sequence[int] | Messages
"""A text to continue, its tokens, or the messages of a conversation."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as tokens, and how to parse its answer.

    Attributes:
        tokens: the tokens.
        formatter: the chat format of a conversation; None for a text to continue.
        thinking: the argument of ``Formatter.render``.
        message_ends: tokens up to the end of each message, in order; empty for a text.
    """

    tokens: Sequence[int]
    formatter: Formatter | None = None
    thinking: bool | None = None
    message_ends: Sequence[int] = ()

    def sampling(self, sampling: Sampling) -> Sampling:
        """The options, with the stops of the chat format added."""
        if self.formatter is None or not self.formatter.stops:
            return sampling
        return replace(sampling, stop=(*sampling.stop, *self.formatter.stops))

    def read(self, answer: Answer) -> Answer:
        """The answer; for a conversation, separated into content, reasoning and tool calls."""
        if self.formatter is None:
            return answer
        return parsed(answer, self.formatter.stream_parser(thinking=self.thinking))


def is_prompt(prompt: object) -> bool:
    """Whether ``prompt`` is one prompt (a text, tokens, or messages), not several."""
    return isinstance(prompt, str) or (
        isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(p, int | Message | Mapping) for p in prompt)
    )


def check_prompts(prompts: object) -> None:
    """Raise ``InvalidOption`` if ``prompts`` is not a list of prompts."""
    if not isinstance(prompts, Sequence):
        raise InvalidOption(
            f"{type(prompts).__name__} is no prompt (accepted: a text, tokens, messages, or a list of them)"
        )
    invalid = next((i for i, prompt in enumerate(prompts) if not is_prompt(prompt)), None)
    if invalid is not None:
        raise InvalidOption(
            f"prompt {invalid} is {prompts[invalid]!r:.80} (accepted: a text, a list of tokens, or a list of messages)"
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
        TemplateError: there is no chat format, or it refuses the messages.
    """
    if not is_prompt(prompt):
        raise InvalidOption(f"{prompt!r:.80} is no prompt (accepted: a text, a list of tokens, or a list of messages)")
    if isinstance(prompt, str) or all(isinstance(token, int) for token in prompt):
        if thinking is not None:
            raise InvalidOption("thinking= is for messages: a text is continued as it is")
        if isinstance(prompt, str):
            return EncodedPrompt(vocab.encode(prompt, add_special=True, parse_special=False))
        return EncodedPrompt(cast("Sequence[int]", prompt))
    chat_format = formatter()
    tokens, ends = encode_messages(vocab, chat_format.render(as_messages(cast("Messages", prompt)), thinking=thinking))
    return EncodedPrompt(tokens, chat_format, thinking, ends)
