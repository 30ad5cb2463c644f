"""Long, deeply nested and broken answers are parsed in linear time, without exceptions."""

from __future__ import annotations

import gc
import time

import pytest

from slm_formatters.parsers.formats import FORMATS

from .answers import ANSWERS, TOOLS

SIZE = 160_000
PATTERNS = {
    "white space": " ",
    "openers": "<",
    "brackets": "[",
    "braces": "{",
    "closing braces": "}",
    "quotes": '"',
    "backslashes": "\\",
    "angle and space": "< ",
    "think": "<think>",
    "think ends": "</think>",
    "calls": "<tool_call>",
    "broken calls": '<tool_call>{"name": "f, "a": 1}</tool_call>',
    "unfinished strings": '<tool_call>{"name": "',
    "function keys": '{"function": ',
    "sections": "<|tool_calls_section_begin|>",
    "parameters": "</parameter>",
    "headers": "<|start|><|message|>",
    "arrows": ">>>a\n",
    "elements": "]<]minimax[>[<a>",
    "print": "print(",
    "letters": "a",
    "escapes": "\\u12",
    "commas": "1,",
}


@pytest.mark.parametrize("name", FORMATS)
def test_parsing_time_is_linear_in_the_text(name: str) -> None:
    """Eight times the text takes at most 8 x 4 times the time; a quadratic algorithm would take 64 times."""
    opening = ANSWERS[name][0][0][: len(ANSWERS[name][0][0]) * 2 // 3]
    for label, pattern in PATTERNS.items():
        text = opening + pattern * (SIZE // len(pattern))
        short, long = (_seconds(name, text[:size]) for size in (SIZE // 8, SIZE))
        for _ in range(3):  # other load of the machine can only increase a time
            if long < 32 * short + 0.1:
                break
            long = min(long, _seconds(name, text))
        else:
            pytest.fail(f"{label}: {short:.3f} s for an eighth, {long:.3f} s for all")


def _seconds(name: str, text: str) -> float:
    """CPU seconds for a text in pieces of 64 characters, without garbage collection."""
    parser = FORMATS[name].parser(tools=TOOLS)
    gc.disable()
    try:
        start = time.process_time()
        for at in range(0, len(text), 64):
            parser.feed(text[at : at + 64])
        parser.finish()
        return time.process_time() - start
    finally:
        gc.enable()


@pytest.mark.parametrize("name", FORMATS)
def test_nesting_is_bounded(name: str) -> None:
    for _, (text, _message) in enumerate(ANSWERS[name]):
        for deep in ("[" * 50_000, '{"a":' * 50_000, "(" * 50_000, "]<]minimax[>[<a>" * 5_000):
            for at in range(0, len(text), max(1, len(text) // 8)):
                parser = FORMATS[name].parser(tools=TOOLS)
                parser.feed(text[:at] + deep + text[at:])
                parser.finish()
