"""Renders conversations as the chat template does, and encodes them with a loss mask.

`render` gives the same text as `chat_template.jinja`, faster. Run this file to compare the two on random conversations.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from conversations import DRILLS, generate
from dialogue import Conversation, Message
from tokenizers import Tokenizer

TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")


def render_with_template(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: object
) -> str:
    """Render by the jinja template itself; `tojson` keeps key order and non-ASCII text, as transformers' does."""
    environment = jinja2.Environment(undefined=jinja2.ChainableUndefined)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TEMPLATE_PATH.read_text())
    return template.render(messages=messages, tools=tools, **options)


def _system(text: str, tools: list[dict[str, Any]]) -> str:
    if tools:
        lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
        text = (text + "\n\n" if text else "") + f"<tools>\n{lines}</tools>"
    return f"<|im_start|>system\n{text}<|im_end|>\n"


def _body(message: Message) -> str:
    text = f"<think>{message.reasoning}</think>" if message.reasoning else ""
    text += message.content
    if message.tool_call:
        name, arguments = (json.dumps(message.tool_call[key], ensure_ascii=False) for key in ("name", "arguments"))
        text += f'<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>'
    return text


def render(conversation: Conversation) -> str:
    """The conversation as text, equal to what the template renders."""
    messages = conversation.messages
    has_system = bool(messages) and messages[0].role == "system"
    text = ""
    if has_system or conversation.tools:
        text = _system(messages[0].content if has_system else "", conversation.tools)
    for message in messages[has_system:]:
        text += f"<|im_start|>{message.role}\n{_body(message)}<|im_end|>\n"
    return text


@dataclass
class Turn:
    """An assistant turn: the model has to write tokens [start, end), including `<|im_end|>`."""

    skill: str
    new_phrase: bool
    start: int
    end: int


@dataclass
class Encoded:
    """Token ids of a conversation, 1 where a token is trained on, and the scored turns."""

    ids: list[int]
    mask: list[int]
    turns: list[Turn] = field(default_factory=list)


class Encoder:
    """Encodes conversations. Special tokens mark the tokens that the model writes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._header: list[int] = tokenizer.encode("<|im_start|>assistant\n").ids
        self._end: int = tokenizer.encode("<|im_end|>").ids[0]

    def encode(self, conversation: Conversation) -> Encoded:
        """Encode a conversation; only turns with a skill are trained on."""
        ids: list[int] = self.tokenizer.encode(render(conversation)).ids
        encoded = Encoded(ids, [0] * len(ids))
        position = 0
        for message in conversation.messages:
            if message.role != "assistant":
                continue
            start = self._after_header(ids, position)
            position = ids.index(self._end, start) + 1
            if message.skill is None:
                continue
            if message.forced_think:
                start += 1
            encoded.mask[start:position] = [1] * (position - start)
            encoded.turns.append(Turn(message.skill, message.new_phrase, start, position))
        return encoded

    def _after_header(self, ids: list[int], position: int) -> int:
        size = len(self._header)
        while True:
            position = ids.index(self._header[0], position)
            if ids[position : position + size] == self._header:
                return position + size
            position += 1


def main() -> None:
    """Compare the fast rendering with the jinja template on random conversations."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=500)
    args = parser.parse_args()
    rng = random.Random(5)
    for index in range(args.count):
        conversation = generate(rng, held_out=index % 2 == 1, drills=DRILLS)
        messages = [message.as_dict() for message in conversation.messages]
        expected = render_with_template(messages, conversation.tools or None)
        if render(conversation) != expected:
            raise SystemExit(f"rendering differs:\n{render(conversation)}\n--- template:\n{expected}")
    print(f"{args.count} conversations render equally")


if __name__ == "__main__":
    main()
