"""Reading answers in the manner of Hermes and Qwen."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slm_core.errors import SessionError
from slm_core.types import Delta, Message, Role, ToolCall
from slm_formatters.parsers.hermes import HermesParser, parse

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = ToolCall("f", {"a": 1})


def answer(content: str = "", reasoning: str | None = None, *calls: ToolCall) -> Message:
    return Message(Role.ASSISTANT, content, reasoning=reasoning, tool_calls=calls)


WHOLE = {
    "content": ("Hello,\n world \n", answer("Hello,\n world \n")),
    "leading white space": ("  Hello", answer("  Hello")),
    "nothing": ("", answer()),
    "white space": (" \n", answer(" \n")),
    "reasoning": ("<think>\nhm, so\n\n</think>\n\nYes. ", answer("Yes. ", "hm, so")),
    "white space before reasoning": (" \n<think>hm</think>Yes", answer("Yes", "hm")),
    "two blocks of reasoning": ("<think>a</think>\n<think> b</think>c", answer("c", "a\nb")),
    "empty reasoning": ("<think>\n\n</think>\n\nYes", answer("Yes")),
    "unclosed reasoning": ("<think>hm, <b", answer("", "hm, <b")),
    "reasoning cut in its tag": ("<think>hm </thi", answer("", "hm </thi")),
    "tag in content": ("I write <think> so </think>", answer("I write <think> so </think>")),
    "content cut in a tag": ("a <tool_", answer("a <tool_")),
    "call": (CALL, answer("", None, F)),
    "calls among content": (f"One moment.\n{CALL}\n{CALL}\n", answer("One moment.", None, F, F)),
    "text after a call": (f"a {CALL}\nb {CALL} ", answer("a\nb", None, F, F)),
    "reasoning and call": (f"<think>call f</think>\n\n{CALL}", answer("", "call f", F)),
    "call in reasoning": (f"<think>{CALL}</think>no", answer("no", CALL)),
    "call without its closing tag": (CALL.removesuffix("</tool_call>"), answer("", None, F)),
    "call cut in its closing tag": (CALL.removesuffix("call>"), answer("", None, F)),
    "arguments as JSON text": (
        r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>',
        answer("", None, F),
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', answer("", None, ToolCall("f", {}))),
    "id": ('<tool_call>{"id": "7", "name": "f"}</tool_call>', answer("", None, ToolCall("f", {}, "7"))),
    "tags and braces in strings": (
        r'<tool_call>{"name": "f", "arguments": {"x": "\"}</tool_call><tool_call>\\"}}</tool_call>',
        answer("", None, ToolCall("f", {"x": '"}</tool_call><tool_call>\\'})),
    ),
}
MALFORMED = [
    '<tool_call>{"name": "f", "arguments": {</tool_call>',
    "<tool_call>f(1)</tool_call>",
    "<tool_call>[]</tool_call>",
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "not JSON"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "argument": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1',
    "<tool_call>",
    "<tool_call>" + "[" * 100_000 + "</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5_000 + "}}</tool_call>",
]


@pytest.mark.parametrize("name", WHOLE)
def test_answer_is_read(name: str) -> None:
    text, message = WHOLE[name]
    assert parse(text) == message


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: text[:50])
def test_malformed_call_stays_in_the_content(text: str) -> None:
    assert parse(f"before {text}") == answer(f"before {text}")


def test_string_that_never_ends_hides_no_later_call() -> None:
    broken = '<tool_call>{"name": "f, "arguments": {}}</tool_call>'
    assert parse(f"{broken} and {CALL} end") == answer(f"{broken} and end", None, F)


def test_prefilled_reasoning() -> None:
    assert parse("hm\n</think>\nYes", may_be_in_reasoning=True) == answer("Yes", "hm")
    assert parse("<think>hm</think>Yes", may_be_in_reasoning=True) == answer("Yes", "hm")
    assert parse("Yes", may_be_in_reasoning=True) == answer("Yes")
    for text in ("\n hm</think>Yes", " <think>hm</think> Yes"):
        parser = HermesParser(in_reasoning=True)
        parser.feed(text)
        assert parser.finish()[1] == answer("Yes", "hm")


def test_deltas_come_as_soon_as_they_are_certain() -> None:
    parser = HermesParser()
    pieces = ["<thi", "nk>a", " b </", "think>", "\n", "c", " <", "3 ", CALL]
    events = [parser.feed(piece) for piece in pieces]
    said, thought = (lambda text: [Delta("content", text)]), (lambda text: [Delta("reasoning", text)])
    assert events == [[], thought("a"), thought(" b"), [], [], said("c"), [], said(" <3"), []]
    assert parser.finish() == ([], answer("c <3", "a b", F))


def test_finished_parser_refuses_more() -> None:
    parser = HermesParser()
    parser.finish()
    with pytest.raises(SessionError):
        parser.feed("x")
    with pytest.raises(SessionError):
        parser.finish()


FRAGMENTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        CALL,
        '{"name": "f"}',
        '"',
        "\\",
        "<",
        " ",
        "\n",
        "a",
        "é",
        "<t",
    ]
)


@given(
    text=st.lists(FRAGMENTS, max_size=14).map("".join),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    in_reasoning=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_result_does_not_depend_on_the_split(text: str, cuts: list[int], in_reasoning: bool) -> None:
    whole = HermesParser(in_reasoning=in_reasoning)
    whole.feed(text)
    message = whole.finish()[1]

    parser = HermesParser(in_reasoning=in_reasoning)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    deltas = [delta for start, end in itertools.pairwise(bounds) for delta in parser.feed(text[start:end])]
    last, split_message = parser.finish()

    assert split_message == message
    for kind, expected in (("content", message.content), ("reasoning", message.reasoning or "")):
        assert "".join(delta.text for delta in deltas + last if delta.kind == kind) == expected


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner))
)
@settings(max_examples=40, deadline=None)
def test_any_arguments_survive(value: object) -> None:
    call = ToolCall("f", {"x": value})
    text = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    assert parse(f"<tool_call>{text}</tool_call>") == answer("", None, call)


def test_call_that_never_closes_comes_back_whole() -> None:
    """The search for its end goes on where it stopped: 20,000 pieces take a moment, not minutes."""
    pieces = ['<tool_call>{"name": "', *(['a\\"</tool_call>'] * 20_000)]
    parser = HermesParser()
    for piece in pieces:
        assert parser.feed(piece) == []
    assert parser.finish()[1] == answer("".join(pieces))
