"""Prompts of messages with embedding rows: rendered as text with placeholders, then split at the placeholders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from slm_core.chat.prompt import PromptEncoder
from slm_core.context.inputs import Held, row_inputs
from slm_core.embedding_rows import ROWS_MARK, EmbeddingRows
from slm_core.errors import InvalidOption, TemplateError
from slm_core.protocols import Vocab
from slm_core.types import Message, Segment

_FIRST, _MOST = 0xF0000, 0xFFFE  # characters for private use (plane 15), which templates do not interpret
_PLACEHOLDER = re.compile(f"[{chr(_FIRST)}-{chr(_FIRST + _MOST - 1)}]")


def with_placeholders(messages: Sequence[Message]) -> tuple[list[Message], list[EmbeddingRows]]:
    """The messages as text only, with a placeholder for each of their rows; the rows, in the order of placeholders.

    Raises:
        InvalidOption: a message has rows, and a text contains a placeholder.
    """
    rows = [each for message in messages for each in message.rows]
    if not rows:
        return list(messages), []
    if len(rows) > _MOST:
        raise InvalidOption(f"{len(rows)} embedding rows in the messages of a chat (accepted: up to {_MOST})")
    placeholders = [chr(_FIRST + i) for i in range(len(rows))]
    texts = (text for message in messages for text in (message.content, message.reasoning or ""))
    if any(map(_PLACEHOLDER.search, texts)):
        raise InvalidOption(
            f"a message contains a character for private use from U+{_FIRST:X} on, and messages of this chat have"
            " embedding rows (accepted: one of both)"
        )
    remaining = iter(placeholders)
    return [_as_text(message, remaining) for message in messages], rows


def _as_text(message: Message, placeholders: Iterator[str]) -> Message:
    if not message.rows:
        return message
    first, *others = message.content.split(ROWS_MARK)
    content = "".join([first, *(next(placeholders) + text for text in others)])
    return replace(message, content=content, rows=())


class RowPromptEncoder:
    """Encodes prompts with embedding rows to the inputs of a sequence, one prompt after another.

    Each text between rows is tokenized by itself, because rows take the place of special tokens.

    Args:
        vocab: the vocabulary.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._encoders: list[PromptEncoder] = []  # of each text: it reuses the tokens of the previous prompt
        self._known: dict[int, tuple[EmbeddingRows, list[Held]]] = {}  # rows of the last prompt, by ``id``

    def encode(self, segments: Sequence[Segment], rows: Sequence[EmbeddingRows]) -> list[Held]:
        """The inputs of a prompt.

        Args:
            segments: the prompt, with placeholders of ``with_placeholders``.
            rows: the rows, in the order of placeholders.

        Raises:
            TemplateError: the template dropped or repeated a placeholder.
        """
        texts, order = _split(segments, len(rows))
        while len(self._encoders) < len(texts):
            self._encoders.append(PromptEncoder(self._vocab))
        inputs: list[Held] = []
        for i, text in enumerate(texts):
            before = rows[order[i - 1]].after if i else ""
            after = rows[order[i]].before if i < len(order) else ""
            whole = [Segment(before, control=True), *text, Segment(after, control=True)] if rows else text
            inputs += self._encoders[i].encode(whole)
            if i < len(order):
                inputs += self._inputs(rows[order[i]])
        self._known = {id(each): self._known[id(each)] for each in rows}
        return inputs

    def _inputs(self, rows: EmbeddingRows) -> list[Held]:
        """The inputs of rows; the same objects for each prompt, so that comparing prompts is cheap."""
        if id(rows) not in self._known:
            self._known[id(rows)] = rows, row_inputs(rows)
        return self._known[id(rows)][1]


def _split(segments: Sequence[Segment], n_rows: int) -> tuple[list[list[Segment]], list[int]]:
    """The texts between placeholders, and the number of each placeholder, in the order of the prompt."""
    if not n_rows:
        return [list(segments)], []
    texts: list[list[Segment]] = [[]]
    order: list[int] = []
    for segment in segments:
        begin = 0
        for match in _PLACEHOLDER.finditer(segment.text):
            texts[-1].append(replace(segment, text=segment.text[begin : match.start()]))
            texts.append([])
            order.append(ord(match[0]) - _FIRST)
            begin = match.end()
        texts[-1].append(replace(segment, text=segment.text[begin:]))
    if sorted(order) != list(range(n_rows)):
        raise TemplateError(
            f"the chat template drops or repeats embedding rows: the prompt has {len(order)} of them, the messages"
            f" have {n_rows}"
        )
    return texts, order
