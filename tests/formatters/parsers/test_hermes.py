"""Parsing reasoning, content and calls of Hermes and Qwen, as an example of all formats with markers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formatters.parsers.helpers import answer, parse, read
from slm_core.errors import SessionError
from slm_core.types import AnswerDelta, CallArguments, CallEnd, CallStart, Delta, MalformedCall, Message, ToolCall
from slm_formatters.parsers.formats import HERMES

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = ToolCall("f", {"a": 1})

WHOLE = {
    "content": ("Hello,\n world \n", answer("Hello,\n world \n")),
    "leading white space": ("  Hello", answer("  Hello")),
    "nothing": ("", answer()),
    "white space": (" \n", answer(" \n")),
    "reasoning": ("<think>\nhm, so\n\n</think>\n\nYes. ", answer("Yes. ", "hm, so")),
    "white space before reasoning": (" \n<think>hm</think>Yes", answer("Yes", "hm")),
    "two blocks of reasoning": ("<think>a</think>\n<think> b</think>c", answer("c", "a\nb")),
    "reasoning after a call": (f"<think>a</think>{CALL}<think>b</think>c", answer("c", "a\nb", F)),
    "empty reasoning": ("<think>\n\n</think>\n\nYes", answer("Yes")),
    "reasoning closed once more": ("\n</think>\n\nYes", answer("Yes")),
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
    "two calls between one pair of tags": (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n{"name": "f", "arguments": {"a": 1}}</tool_call>',
        answer("", None, F, F),
    ),
    "list of calls": ('<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>', answer("", None, F)),
    "arguments as JSON text": (
        r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>',
        answer("", None, F),
    ),
    "arguments before the name": ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', answer("", None, F)),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', answer("", None, F)),
    "wrapped": (
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>',
        answer("", None, F),
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', answer("", None, ToolCall("f", {}))),
    "null arguments": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', answer("", None, ToolCall("f", {}))),
    "id": ('<tool_call>{"id": "7", "name": "f"}</tool_call>', answer("", None, ToolCall("f", {}, "7"))),
    "id after the arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": 7}</tool_call>',
        answer("", None, ToolCall("f", {"a": 1}, "7")),
    ),
    "line break in a string": (
        '<tool_call>{"name": "f", "arguments": {"a": "x\n\ty"}}</tool_call>',
        answer("", None, ToolCall("f", {"a": "x\n\ty"})),
    ),
    "tags and braces in strings": (
        r'<tool_call>{"name": "f", "arguments": {"x": "\"}</tool_call><tool_call>\\"}}</tool_call>',
        answer("", None, ToolCall("f", {"x": '"}</tool_call><tool_call>\\'})),
    ),
}
MALFORMED = {
    '{"name": "f", "arguments": {': "not valid JSON at '<'",
    "f(1)": "expected '{'",
    "[]": "expected '{'",
    '{"name": "", "arguments": {}}': "the call has no name",
    '{"name": 1, "arguments": {}}': "expected a string",
    '{"name": "f", "arguments": [1]}': "the arguments are not a JSON object",
    '{"name": "f", "arguments": "not JSON"}': "not valid JSON",
    '{"name": "f", "arguments": {"a": NaN}}': "NaN is not JSON",
    '{"name": "f", "arguments": {"a": True}}': "not valid JSON",
    '{"name": "f", "argument": {}}': "a call has no key 'argument'",
    '{"name": "f", "arguments": {"a": 1,}}': "not valid JSON at '}'",
    '{"name": "f", "arguments": {}} really': "expected '</tool_call>'",
    '{"name": "f", "arguments": {}, "arguments": {}}': "two sets of arguments",
    '{"name": "f", "name": "g"}': "two names",
    "[" * 100_000: "expected '{'",
    '{"name": "f", "arguments": {"a": ' + "[" * 100_000: "nested deeper than 200",
    '{"function": ' * 5_000: "expected a string",
    '{"name": "f", "arguments": {"a": ' + "9" * 5_000 + "}}": "not valid JSON",
}


@pytest.mark.parametrize("name", WHOLE)
def test_answers_are_parsed(name: str) -> None:
    text, message = WHOLE[name]
    assert parse(HERMES, text) == message


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: body[:40])
def test_a_malformed_call_is_reported_with_its_text(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    message = parse(HERMES, f"before {text} after")
    assert [call.text for call in message.malformed_calls] == [text]
    assert MALFORMED[body] in message.malformed_calls[0].reason
    assert (message.content, message.tool_calls) == ("before after", ())


@pytest.mark.parametrize("cut", range(len("<tool_call>"), len(CALL) - len("}\n</tool_call>")))
def test_a_truncated_call_is_malformed(cut: int) -> None:
    message = parse(HERMES, f"a {CALL[:cut]}")
    assert (message.content, message.tool_calls) == ("a", ())
    assert [call.text for call in message.malformed_calls] == [CALL[:cut]]


def test_complete_calls_before_a_malformed_call_are_kept() -> None:
    text = '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": }}]</tool_call>'
    message = parse(HERMES, text)
    assert message.tool_calls == (F,)
    assert [call.text for call in message.malformed_calls] == ['{"name": "f", "arguments": {"a": }}]</tool_call>']


def test_an_unterminated_string_does_not_hide_later_calls() -> None:
    broken = '<tool_call>{"name": "f, "arguments": {}}</tool_call>'
    message = parse(HERMES, f"{broken} and {CALL} end")
    assert (message.content, message.tool_calls) == ("and end", (F,))
    assert [call.text for call in message.malformed_calls] == [broken]


def test_reasoning_begun_by_the_prompt() -> None:
    for text in ("\n hm</think>Yes", " <think>hm</think> Yes", "hm\n</think>\nYes"):
        assert parse(HERMES, text, in_reasoning=True) == answer("Yes", "hm")
    assert parse(HERMES, "hm", in_reasoning=True) == answer("", "hm")
    assert parse(HERMES, "</think>Yes", in_reasoning=True) == answer("Yes")


def test_reasoning_markers_are_options() -> None:
    form = HERMES.with_reasoning("[[", "]]")
    assert parse(form, "[[a <think>]]b") == answer("b", "a <think>")
    assert form.reasoning_end("<|assistant|>\n[[\n") == "]]"
    assert form.reasoning_end("<|assistant|>\n[[]]\n") is None


def test_deltas_are_emitted_as_soon_as_they_are_certain() -> None:
    parser = HERMES.parser()
    pieces = ["<thi", "nk>a", " b </", "think>", "\n", "c", " <", "3 "]
    pieces += ['<tool_call>\n{"name": "f", "argum', 'ents": {"a']
    pieces += ['": 1', "}", "}\n</tool", "_call>"]
    events = [parser.feed(piece) for piece in pieces]
    assert events == [
        [],
        reasoning("a"),
        reasoning(" b"),
        [],
        [],
        content("c"),
        [],
        content(" <3"),
        [],
        [CallStart(0, "f"), CallArguments(0, '{"a')],
        [CallArguments(0, '": ')],
        [CallArguments(0, "1}")],
        [],
        [CallEnd(0, F)],
    ]
    assert parser.finish() == ([], answer("c <3", "a b", F))


def content(text: str) -> list[AnswerDelta]:
    return [Delta("content", text)]


def reasoning(text: str) -> list[AnswerDelta]:
    return [Delta("reasoning", text)]


def test_a_finished_parser_refuses_more_text() -> None:
    parser = HERMES.parser()
    parser.finish()
    with pytest.raises(SessionError):
        parser.feed("x")
    with pytest.raises(SessionError):
        parser.finish()


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner))
)
@settings(max_examples=40, deadline=None)
def test_arguments_survive(value: object) -> None:
    call = ToolCall("f", {"x": value})
    text = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    assert parse(HERMES, f"<tool_call>{text}</tool_call>") == answer("", None, call)


def test_an_unclosed_call_is_reported_whole() -> None:
    pieces = ['<tool_call>{"name": "', *(['a\\"</tool_call>'] * 20_000)]
    message = read(HERMES, pieces)[1]
    reason = "the answer ends within a string"
    expected: Message = answer(malformed=[MalformedCall("".join(pieces), reason)])
    assert message == expected
