"""The noun Formatter: renders messages to a prompt, and parses answers to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slm_core.types import AnswerDelta, CallFormat, Message, Segment, Tool


class StreamParser(Protocol):
    """Parses an answer piece by piece. The result does not depend on the pieces."""

    def feed(self, text: str) -> list[AnswerDelta]:
        """Add a piece of the answer, with control tokens as text; returns the deltas that are now certain, in order.

        Raises:
            SessionError: after ``finish``.
        """
        ...

    def finish(self) -> tuple[list[AnswerDelta], Message]:
        """End the answer; returns the last deltas, and the whole message, which is all deltas joined.

        Raises:
            SessionError: called before.
        """
        ...


class AnswerFormat(Protocol):
    """How a model writes its answers: reasoning, content and tool calls."""

    @property
    def name(self) -> str:
        """Its name, also for ``slm_core.formatter(parser=...)`` if a plugin provides it."""
        ...

    @property
    def call_format(self) -> CallFormat | None:
        """The format of calls, for a grammar; None if there are no calls, or ``CallFormat`` cannot describe them."""
        ...

    def parser(self, *, tools: Sequence[Mapping[str, object]] = (), in_reasoning: bool = False) -> StreamParser:
        """A parser for one answer; set ``in_reasoning`` if the prompt leaves reasoning open."""
        ...

    def reasoning_end(self, prompt_end: str) -> str | None:
        """The text that ends the reasoning which a prompt with this end leaves open; None if it leaves none open."""
        ...

    def closes_reasoning(self, text: str) -> bool:
        """Whether an answer closes reasoning that it did not open."""
        ...

    def with_reasoning(self, begin: str, end: str) -> AnswerFormat:
        """The same format with other reasoning markers.

        Raises:
            TemplateError: this format has no reasoning markers, or a marker is empty.
        """
        ...


class Formatter(Protocol):
    """The model's chat format."""

    @property
    def name(self) -> str:
        """The origin of the format, for ``ModelInfo.formatter``."""
        ...

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer, in addition to the vocabulary's EOG tokens."""
        ...

    @property
    def call_format(self) -> CallFormat | None:
        """The format of tool calls in answers, for a grammar that allows only valid calls; None if it is unknown."""
        ...

    def reasoning_end(self, *, thinking: bool | None = None) -> str | None:
        """The text that ends the reasoning at the start of an answer, with control tokens as text.

        None if the answer begins with content according to the prompt; ``thinking`` as in ``render``.
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
        """Render messages to a prompt in the format of the model's training.

        Content that spells a control token stays content: it is in segments with ``control=False``.

        Args:
            messages: the conversation; mappings are passed to the template unchanged ("role", "content", ...).
            tools: the tools that the model may call.
            add_generation_prompt: end with the start of the assistant's answer.
            continue_final_message: instead, leave the last message open, so that the model continues its content, or
                its reasoning with "reasoning_content".
            thinking: turn reasoning on or off; None uses the template's default.
            template_kwargs: passed to the template.

        Raises:
            TemplateError: the template refused the messages, failed, has no ``thinking``, or cannot leave the last
                message open.
            InvalidOption: an object that is not a tool.
        """
        ...

    def parse(self, text: str, *, tools: Sequence[Tool] = ()) -> Message:
        """Parse an answer into a message: content, reasoning, tool calls, and malformed calls.

        Args:
            text: the answer, with control tokens as text.
            tools: as in ``render``; formats that write all arguments as text need them to restore types.
        """
        ...

    def stream_parser(self, *, thinking: bool | None = None, tools: Sequence[Tool] = ()) -> StreamParser:
        """A parser for a streaming answer; ``thinking`` and ``tools`` as in ``render``."""
        ...
