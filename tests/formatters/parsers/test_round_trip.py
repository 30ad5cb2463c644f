"""Calls written by a template are parsed back, for every published template that writes calls."""

from __future__ import annotations

import json
import os.path
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from slm_core.errors import TemplateError
from slm_core.plugins import FormatterSource
from slm_core.types import Message, Role, ToolCall
from slm_formatters.template import TemplateFormatter

PARAMETERS: dict[str, object] = {
    "text": {"type": "string"},
    "digits": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "sure": {"type": "boolean"},
    "list": {"type": "array", "items": {"type": "integer"}},
    "object": {
        "type": "object",
        "properties": {"key": {"type": "string"}, "deep": {"type": "array", "items": {"type": "string"}}},
    },
    "empty": {"type": "string"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does something.",
            "parameters": {"type": "object", "properties": PARAMETERS, "required": ["text"]},
        },
    }
    for name in ("get_weather", "search-2.web")
]
ARGUMENTS: dict[str, object] = {
    "text": 'naïve "quotes" {braces} <b>tags</b> \\ 日本 🎉',
    "digits": "007",
    "count": -12,
    "share": 2.5,
    "sure": True,
    "list": [1, 2, 3],
    "object": {"key": "it's </x> {", "deep": ["a", "é"]},
    "empty": "",
}
ANSWERS = {
    "one call": [ToolCall("get_weather", {"text": "Paris"}, "call12345")],
    "all kinds of arguments": [ToolCall("get_weather", ARGUMENTS, "call12345")],
    "two calls": [
        ToolCall("get_weather", {"text": "Paris", "count": 1}, "call12345"),
        ToolCall("search-2.web", {"text": "\nline\n\nline", "sure": False}, "call67890"),
    ],
    "null": [ToolCall("get_weather", {"text": "x", "count": None}, "call12345")],
    "no arguments": [ToolCall("get_weather", {}, "call12345")],
}
WRITES_NO_CALLS = {
    "LFM2-8B-A1B": "writes nothing but the content of a message",
    "google-gemma-2-2b-it": "knows no tools",
    "ibm-granite-granite-3.3-2B-Instruct": "writes nothing but the content of a message",
    "Kimi-K2-Instruct": "fails on every message with calls, with transformers too",
    "Kimi-K2-Thinking": "fails on every message with calls, with transformers too",
}
LOSES = {
    ("GigaChat3-10B-A1.8B", "two calls"): "writes the first call only",
    ("GigaChat3.1-10B-A1.8B", "two calls"): "writes the first call only",
    ("openai-gpt-oss-120b", "two calls"): "writes the first call only",
    ("meta-llama-Llama-3.2-3B-Instruct", "two calls"): "refuses two calls",
    ("meta-llama-Llama-3.3-70B-Instruct", "two calls"): "refuses two calls",
    ("MiniMax-M3", "null"): "leaves out what is null",
}
"""Answers that a template writes with losses. Every other pair of template and answer survives the round trip."""


@pytest.fixture(scope="module")
def formatters(shared_dir: Path) -> dict[str, TemplateFormatter]:
    formatters = {}
    for path in sorted((shared_dir / "oracles" / "chat_templates").glob("*.json")):
        case = json.loads(path.read_text())["cases"][0]
        with path.with_suffix(".jinja").open(newline="") as file:
            source = FormatterSource(file.read(), case["bos_token"], case["eos_token"], now=datetime(2026, 1, 15))
        formatters[path.stem] = TemplateFormatter(source)
    return formatters


def answer_to(formatter: TemplateFormatter, answer: Message) -> str:
    """The text after the generation prompt, or after the common prefix if the template writes history differently."""
    question = [Message(Role.USER, "What is the weather?")]
    prompt = rendered(formatter, question, add_generation_prompt=True)
    whole = rendered(formatter, [*question, answer], add_generation_prompt=False)
    common = os.path.commonprefix([prompt, whole])  # noqa: RUF071  # these are no paths
    if common != prompt and common.rfind("<") > common.rfind(">"):
        common = common[: common.rfind("<")]  # the common prefix ends within a marker
    return whole[len(common) :]


def rendered(formatter: TemplateFormatter, messages: list[Message], *, add_generation_prompt: bool) -> str:
    try:
        segments = formatter.render(messages, tools=TOOLS, add_generation_prompt=add_generation_prompt)
    except TemplateError:  # one published template refuses tools
        segments = formatter.render(messages, add_generation_prompt=add_generation_prompt)
    return "".join(segment.text for segment in segments)


def test_calls_of_every_template_survive_a_round_trip(formatters: dict[str, TemplateFormatter]) -> None:
    same, wrong = 0, []
    for template, formatter in formatters.items():
        for label, calls in ANSWERS.items():
            if template in WRITES_NO_CALLS or (template, label) in LOSES:
                continue
            text = answer_to(formatter, Message(Role.ASSISTANT, "", tool_calls=calls))
            message = formatter.parse(text, tools=TOOLS)
            if (
                without_ids(message.tool_calls) == without_ids(calls)
                and not message.malformed_calls
                and not message.content
            ):
                same += 1
            else:
                wrong.append((template, label, text, message))
    assert not wrong, f"{len(wrong)} answers are not parsed back; first: {wrong[0]}"
    assert same == (len(formatters) - len(WRITES_NO_CALLS)) * len(ANSWERS) - len(LOSES)
    print(f"{same} answers of {len(formatters) - len(WRITES_NO_CALLS)} templates come back")  # noqa: T201


def without_ids(calls: Sequence[ToolCall]) -> list[tuple[str, object]]:
    return [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(("template", "label"), LOSES)
def test_known_losses_of_templates(formatters: dict[str, TemplateFormatter], template: str, label: str) -> None:
    answer = Message(Role.ASSISTANT, "", tool_calls=ANSWERS[label])
    if LOSES[template, label].startswith("refuses"):
        with pytest.raises(TemplateError):
            formatters[template].render([Message(Role.USER, "x"), answer], tools=TOOLS)
    else:
        message = formatters[template].parse(answer_to(formatters[template], answer), tools=TOOLS)
        assert len(message.tool_calls) == 1
        assert not message.malformed_calls


IDS = {
    "Mistral-Small-3.2-24B-Instruct-2506": ["call12345", "call67890"],
    "mistralai-Mistral-Nemo-Instruct-2407": ["call12345", "call67890"],
    "upstage-Solar-Open-100B": ["call12345", "call67890"],
    "Cohere2MoE": ["0", "1"],  # the template renumbers calls
}


@pytest.mark.parametrize("template", IDS)
def test_written_ids_survive_a_round_trip(formatters: dict[str, TemplateFormatter], template: str) -> None:
    text = answer_to(formatters[template], Message(Role.ASSISTANT, "", tool_calls=ANSWERS["two calls"]))
    assert [call.id for call in formatters[template].parse(text, tools=TOOLS).tool_calls] == IDS[template]


def test_content_and_reasoning_survive_a_round_trip(formatters: dict[str, TemplateFormatter]) -> None:
    """If a template writes reasoning, the reasoning and the content are separated exactly."""
    written = []
    for template, formatter in formatters.items():
        answer = Message(Role.ASSISTANT, "It rains.\n\nTake an umbrella.", reasoning="Let me see.\nRain.")
        text = answer_to(formatter, answer)
        message = formatter.parse(text, tools=TOOLS)
        assert message.content == answer.content, f"{template} ({formatter.parser}): {text!r}"
        assert not message.tool_calls
        assert not message.malformed_calls
        if "Let me see." in text:
            written.append(template)
            assert message.reasoning == answer.reasoning, f"{template} ({formatter.parser}): {text!r}"
    assert len(written) >= 15, written


TEXTS = st.lists(
    st.sampled_from(
        [
            "word",
            " ",
            "\n",
            '"',
            "'",
            "\\",
            "{",
            "}",
            "[",
            "]",
            "(",
            ")",
            "<b>",
            "</x>",
            "&",
            "é",
            "日本",
            "🎉",
            "1",
            "=",
            ",",
        ]
    ),
    max_size=6,
).map("".join)
VALUES: dict[str, st.SearchStrategy[object]] = {
    "text": TEXTS,
    "digits": st.sampled_from(["007", "1.0", "true", "null", "[1]", "12"]),
    "count": st.integers(-(2**40), 2**40),
    "share": st.integers(-999, 999).map(lambda n: n / 8),
    "sure": st.booleans(),
    "list": st.lists(st.integers(0, 99), max_size=3),
    "object": st.fixed_dictionaries({"key": TEXTS, "deep": st.lists(TEXTS, max_size=2)}),
    "empty": st.just(""),
}
UNESCAPED = {"LFM2.5-8B-A1B": "'\\"}
"""Characters that a template writes unescaped into quotes, so that the end of the text is ambiguous."""
ARGUMENT_SETS = st.sets(st.sampled_from(sorted(VALUES)), max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: VALUES[name] for name in sorted(names)})
)
CALLS = st.lists(st.tuples(st.sampled_from(["get_weather", "search-2.web"]), ARGUMENT_SETS), min_size=1, max_size=2)


@given(data=st.data(), drawn=CALLS)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_calls_survive_a_round_trip(
    formatters: dict[str, TemplateFormatter], data: st.DataObject, drawn: list[tuple[str, dict[str, object]]]
) -> None:
    template = data.draw(st.sampled_from(sorted(set(formatters) - set(WRITES_NO_CALLS))), label="template")
    label = "two calls" if len(drawn) == 2 else "one call"
    assume((template, label) not in LOSES)
    text_of_arguments = json.dumps([arguments for _, arguments in drawn])
    assume(not any(character in text_of_arguments for character in UNESCAPED.get(template, "")))
    calls = [ToolCall(name, arguments, f"call{i:05}") for i, (name, arguments) in enumerate(drawn)]
    text = answer_to(formatters[template], Message(Role.ASSISTANT, "", tool_calls=calls))
    message = formatters[template].parse(text, tools=TOOLS)
    assert without_ids(message.tool_calls) == without_ids(calls), f"{template}: {text!r}"
    assert (message.content, message.malformed_calls) == ("", ())
