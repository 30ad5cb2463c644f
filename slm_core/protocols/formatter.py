"""The noun Formatter: messages to prompt, and text back to a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slm_core.types import AnswerDelta, CallFormat, Message, Segment, Tool


class StreamParser(Protocol):
    """Reads an answer piece by piece. The result does not depend on how the text was split."""

    def feed(self, text: str) -> list[AnswerDelta]:
        """Take a piece of the answer, control tokens spelled out; returns what is now certain, in order.

        Raises:
            SessionError: after ``finish``.
        """
        ...

    def finish(self) -> tuple[list[AnswerDelta], Message]:
        """The answer is over: what was held back, and the whole message, which is all deltas joined.

        Raises:
            SessionError: called before.
        """
        ...


class AnswerFormat(Protocol):
    """How a model writes its answers: reasoning, content and tool calls."""

    @property
    def name(self) -> str:
        """What it is called, in ``slm_core.formatter(parser=...)`` too if a plugin provides it."""
        ...

    @property
    def call_format(self) -> CallFormat | None:
        """How it writes calls, for a grammar; None where it writes none, or in a way that ``CallFormat`` cannot say."""
        ...

    def parser(self, *, tools: Sequence[Mapping[str, object]] = (), in_reasoning: bool = False) -> StreamParser:
        """A parser for one answer; ``in_reasoning`` where the prompt left reasoning open."""
        ...

    def reasoning_end(self, prompt_end: str) -> str | None:
        """What ends the reasoning that a prompt leaves open if it ends so after its last message; None if none."""
        ...

    def closes_reasoning(self, text: str) -> bool:
        """Whether an answer closes reasoning that it has not opened."""
        ...

    def with_reasoning(self, begin: str, end: str) -> AnswerFormat:
        """The same with other bounds of reasoning.

        Raises:
            TemplateError: this format does not tell reasoning by bounds, or one of them is empty.
        """
        ...


class Formatter(Protocol):
    """The model's own chat format."""

    @property
    def name(self) -> str:
        """Where the format came from, for ``ModelInfo.formatter``."""
        ...

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer, besides the vocabulary's EOG tokens."""
        ...

    @property
    def call_format(self) -> CallFormat | None:
        """How answers write tool calls, for a grammar that allows valid ones only; None where that is not known."""
        ...

    def reasoning_end(self, *, thinking: bool | None = None) -> str | None:
        """What ends the reasoning that an answer begins with, control tokens spelled out.

        None where it begins with content, as far as the prompt tells; ``thinking`` as given to ``render``.
        """
        ...

    def render(
        self,
        messages: Sequence[Message | Mapping[str, object]],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        thinking: bool | None = None,
        **template_kwargs: object,
    ) -> list[Segment]:
        """Turn messages into the prompt that the model was trained on.

        Content that spells a control token stays content: it is in segments with ``control=False``.

        Args:
            messages: the conversation; mappings are passed to the template as they are ("role", "content", ...).
            tools: what the model may call.
            add_generation_prompt: end with what opens the assistant's answer.
            continue_final_message: leave the last message open in place of that, so that the model goes on with it:
                its content, or its reasoning with "reasoning_content".
            thinking: ask for reasoning, or for none; None leaves it to the template.
            template_kwargs: passed to the template.

        Raises:
            TemplateError: the template refused the messages, failed, does not understand ``thinking``, or cannot leave
                the last message open.
            InvalidOption: something that is no tool.
        """
        ...

    def parse(self, text: str, *, tools: Sequence[Mapping[str, object]] = ()) -> Message:
        """Turn an answer into a message: content, reasoning, tool calls, and calls that are malformed.

        Args:
            text: the answer, control tokens spelled out.
            tools: as given to ``render``; formats that write all arguments as text need them to restore their types.
        """
        ...

    def stream_parser(
        self, *, thinking: bool | None = None, tools: Sequence[Mapping[str, object]] = ()
    ) -> StreamParser:
        """A parser for one answer, to feed while it streams; ``thinking`` and ``tools`` as given to ``render``."""
        ...
