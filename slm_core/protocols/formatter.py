"""The noun Formatter: messages to prompt, and text back to a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slm_core.types import Delta, Message, Segment


class StreamParser(Protocol):
    """Reads an answer piece by piece. The result does not depend on how the text was split."""

    def feed(self, text: str) -> list[Delta]:
        """Take a piece of the answer; returns what is now certain, in order."""
        ...

    def finish(self) -> tuple[list[Delta], Message]:
        """The answer is over: what was held back, and the whole message."""
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

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        **template_kwargs: object,
    ) -> list[Segment]:
        """Turn messages into the prompt that the model was trained on.

        Content that spells a control token stays content: it is in segments with ``control=False``.

        Args:
            messages: the conversation.
            tools: JSON schemas of the tools the model may call.
            add_generation_prompt: end with what opens the assistant's answer.
            thinking: ask for reasoning, or for none; None leaves it to the template.
            template_kwargs: passed to the template.

        Raises:
            TemplateError: the template refused the messages, failed, or does not understand ``thinking``.
        """
        ...

    def parse(self, text: str) -> Message:
        """Turn an answer into a message: content, reasoning, tool calls."""
        ...

    def stream_parser(self, *, thinking: bool | None = None) -> StreamParser:
        """A parser for one answer, to feed while it streams; ``thinking`` as given to ``render``."""
        ...
