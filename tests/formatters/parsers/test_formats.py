"""Each named format parses published answers, for every split of the text."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slm_core.hookspecs import Entry
from slm_core.plugins import Registry, registry
from slm_core.types import Message, ToolCall
from slm_formatters.parsers.formats import FORMATS, HERMES

from .answers import ANSWERS, SEARCH_ARGUMENTS, TOOLS
from .helpers import answer, parse, read

CASES = [(name, text, message) for name, cases in ANSWERS.items() for text, message in cases]


def test_every_format_has_an_answer() -> None:
    assert sorted(ANSWERS) == sorted(FORMATS) == sorted(set(registry().answer_formats) & set(FORMATS))


@pytest.mark.parametrize(("name", "text", "message"), CASES, ids=[f"{name}: {text[:30]}" for name, text, _ in CASES])
def test_published_answers_are_parsed(name: str, text: str, message: Message) -> None:
    form = registry().answer_format(name)
    assert read(form, [text], tools=TOOLS)[1] == message
    assert read(form, text, tools=TOOLS)[1] == message, "the text character by character"


@pytest.mark.parametrize(("name", "text", "message"), CASES, ids=[f"{name}: {text[:30]}" for name, text, _ in CASES])
def test_truncated_answers_contain_only_complete_calls(name: str, text: str, message: Message) -> None:
    for end in range(len(text)):
        partial = read(FORMATS[name], [text[:end]], tools=TOOLS)[1]
        whole = list(message.tool_calls[: len(partial.tool_calls)])
        if name not in _OPEN_ENDED:
            assert list(partial.tool_calls) == whole, f"cut at {end}: {text[:end]!r}"
        assert len(partial.malformed_calls) <= 1
        for call in partial.malformed_calls:
            assert call.text in text[:end]
            assert call.reason


_OPEN_ENDED = ("functionary_v3_2", "harmony", "llama3")
"""Formats in which the argument is code: a truncated answer has truncated code."""


MARKERS = sorted(
    {
        marker
        for cases in ANSWERS.values()
        for text, _ in cases
        for marker in (*text.split(" "), *text.replace("><", "> <").replace("[", " [").split())
        if 1 < len(marker) < 60
    }
)
PIECES = st.sampled_from(
    [*MARKERS, "{", "}", "[", "]", '"', "'", "\\", "\\n", ":", ",", "=", "(", ")", "\n", " ", "é", "1"]
)


@given(
    name=st.sampled_from(sorted(FORMATS)),
    pieces=st.lists(PIECES | st.text(max_size=3), max_size=14),
    cuts=st.lists(st.integers(0, 300), max_size=12),
    in_reasoning=st.booleans(),
    with_tools=st.booleans(),
)
@settings(max_examples=1000, deadline=None)
def test_random_text_is_parsed_the_same_for_any_split(
    name: str, pieces: list[str], cuts: list[int], in_reasoning: bool, with_tools: bool
) -> None:
    _assert_split_does_not_matter(name, "".join(pieces), cuts, in_reasoning, with_tools)


@given(
    case=st.sampled_from(CASES),
    edits=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 5), PIECES | st.just("")), max_size=4),
    cuts=st.lists(st.integers(0, 600), max_size=12),
    in_reasoning=st.booleans(),
    with_tools=st.booleans(),
)
@settings(max_examples=1000, deadline=None)
def test_damaged_answers_are_parsed_the_same_for_any_split(
    case: tuple[str, str, Message],
    edits: list[tuple[int, int, str]],
    cuts: list[int],
    in_reasoning: bool,
    with_tools: bool,
) -> None:
    name, text, _ = case
    for at, length, piece in edits:
        text = text[:at] + piece + text[at + length :]
    _assert_split_does_not_matter(name, text, cuts, in_reasoning, with_tools)


def _assert_split_does_not_matter(name: str, text: str, cuts: list[int], in_reasoning: bool, with_tools: bool) -> None:
    tools = TOOLS if with_tools else ()
    whole = read(FORMATS[name], [text], tools=tools, in_reasoning=in_reasoning)[1]
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    assert read(FORMATS[name], pieces, tools=tools, in_reasoning=in_reasoning)[1] == whole
    assert read(FORMATS[name], text, tools=tools, in_reasoning=in_reasoning)[1] == whole
    assert all(call.text in text for call in whole.malformed_calls)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text(min_size=1), VALUES, max_size=4), ascii_only=st.booleans())
@settings(max_examples=500, deadline=None)
def test_json_arguments_survive(arguments: dict[str, object], ascii_only: bool) -> None:
    text = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only)
    assert parse(HERMES, f"<tool_call>{text}</tool_call>") == answer("", None, ToolCall("f", arguments))


KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


@given(arguments=st.dictionaries(KEYS, VALUES, max_size=4))
@settings(max_examples=500, deadline=None)
def test_python_arguments_survive(arguments: dict[str, object]) -> None:
    text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    form = FORMATS["lfm2"]
    message = parse(form, f"<|tool_call_start|>[f({text})]<|tool_call_end|>")
    assert message == answer("", None, ToolCall("f", arguments)), text


@given(value=st.text(alphabet=st.characters(exclude_categories=["Cs"])), padded=st.booleans())
@settings(max_examples=500, deadline=None)
def test_text_between_tags_survives(value: str, padded: bool) -> None:
    tools = TOOLS[:1]
    if padded:
        body = f"<tool_call><function=get_weather>\n<parameter=city>\n{value}\n</parameter>\n</function></tool_call>"
        form = FORMATS["qwen3_coder"]
    else:
        body = f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
        form = FORMATS["glm"]
    assert parse(form, body, tools=tools) == answer("", None, ToolCall("get_weather", {"city": value}))


def test_arguments_keep_their_escapes() -> None:
    text = f'<tool_call>{{"name": "search", "arguments": {SEARCH_ARGUMENTS}}}</tool_call>'
    assert parse(HERMES, text).tool_calls[0].arguments == json.loads(SEARCH_ARGUMENTS)


def test_plugins_can_provide_formats() -> None:
    class Plugin:
        from slm_core.hookspecs import hookimpl

        @hookimpl
        def slm_answer_formats(self) -> list[Entry]:
            return [Entry("mine", lambda: HERMES)]

    assert Registry({"mine": Plugin()}).answer_format("mine") is HERMES
