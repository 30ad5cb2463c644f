"""Renders test conversations with a template, from which the format of answers is inferred.

Comparing renderings that differ in one property is the idea of llama.cpp's template analysis. Here, test conversations
use words that occur nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slm_core.errors import TemplateError

Render: TypeAlias = Callable[[Sequence[Mapping[str, object]], Sequence[Mapping[str, object]], bool], str]
"""From messages, tools and whether to open an answer, to the prompt; raises ``TemplateError``."""

ASKED, SAID, THOUGHT = "zqasked", "zqsaid", "zqthought"
NAME, OTHER_NAME = "zqfirst", "zqsecond"
KEYS = ("zqa", "zqb", "zqc")
TEXT, NUMBER, LAST_TEXT = "zqtext", 90217, "zqlast"
ARGUMENTS: Mapping[str, object] = dict(zip(KEYS, (TEXT, NUMBER, LAST_TEXT), strict=True))
IDS = ("zqid00001", "zqid00002")

_TYPES = {"zqa": "string", "zqb": "integer", "zqc": "string"}
TOOLS: tuple[Mapping[str, object], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "x",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind, "description": "x"} for key, kind in _TYPES.items()},
                "required": list(KEYS),
            },
        },
    }
    for name in (NAME, OTHER_NAME)
)
_TOKEN = re.compile(r"<[^<>\s]*>?|\[[^\[\]\s]*\]|\s+|[^<\[\s]+|\[")


@dataclass(frozen=True, slots=True)
class Probes:
    """The renderings; "" if the template refuses a conversation.

    Attributes:
        prompt: a question, and the start of the answer.
        answered: a question and a plain answer.
        thought: a question and an answer with reasoning.
        called: a question and a call.
        called_twice: a question and two calls.
        thought_called: a question and a call after reasoning.
    """

    prompt: str
    answered: str
    thought: str
    called: str
    called_twice: str
    thought_called: str


def probe(render: Render) -> Probes:
    """Render the conversations."""

    def rendering(*answer: Mapping[str, object], tools: bool = True) -> str:
        messages = [{"role": "user", "content": ASKED}, *answer]
        try:
            return render(messages, TOOLS if tools else (), not answer)
        except TemplateError:
            return rendering(*answer, tools=False) if tools else ""

    answer_message = {"role": "assistant", "content": SAID}
    thought = {"reasoning_content": THOUGHT, "reasoning": THOUGHT, "thinking": THOUGHT}

    def called(number: int, extra: Mapping[str, object]) -> str:
        for as_text in (False, True):
            calls = [_call(index, as_text=as_text) for index in range(number)]
            rendered = rendering({"role": "assistant", "content": "", **extra, "tool_calls": calls})
            if TEXT in rendered:
                return rendered
        return ""

    return Probes(
        prompt=rendering(),
        answered=rendering(answer_message),
        thought=rendering(answer_message | thought),
        called=called(1, {}),
        called_twice=called(2, {}),
        thought_called=called(1, thought),
    )


def _call(index: int, *, as_text: bool) -> Mapping[str, object]:
    arguments: object = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
    return {
        "type": "function",
        "id": IDS[index],
        "function": {"name": (NAME, OTHER_NAME)[index], "arguments": arguments},
    }


# Texts as sequences of markers, words and white space, so that common parts of texts end at the end of a marker.


def tokens(text: str, mark: str = "") -> list[str]:
    """Split a text; ``mark`` belongs to the marker after it."""
    if not mark:
        return _TOKEN.findall(text)
    return re.findall(rf"{re.escape(mark)}<[^<>]*>|" + _TOKEN.pattern, text)


def is_marker(token: str) -> bool:
    """Whether a token is a marker, not a word."""
    return len(token) > 2 and (token[0], token[-1]) in (("<", ">"), ("[", "]"))


def shared_start(one: str, other: str) -> str:
    """The common prefix, in the spelling of ``one``; all white space is equal."""
    return "".join(_shared(tokens(one), tokens(other)))


def shared_end(one: str, other: str, mark: str = "") -> str:
    """The common suffix, in the spelling of ``one``; all white space is equal."""
    shared = list(_shared(reversed(tokens(one, mark)), reversed(tokens(other, mark))))
    return "".join(reversed(shared))


def _shared(one: Iterable[str], other: Iterable[str]) -> Iterator[str]:
    for left, right in zip(one, other, strict=False):
        if left != right and (left.strip() or right.strip()):
            return
        yield left


def words(literal: str) -> str:
    """A literal with each run of white space replaced by one space."""
    return " ".join(literal.split())
