"""Differences between templates: the switch of reasoning, and the arguments of tool calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import slm_core as slm
from slm_core.errors import TemplateError
from slm_core.protocols import Formatter
from slm_core.types import Message, Role, ToolCall

QUESTION = [Message(Role.USER, "Hi")]
ARGUMENTS = {"city": "Zürich", "days": [1, 2.5, {"deep": None}], "quote": "\"'</tool_call>", "on": True}

# From the sources of the templates.
UNDERSTAND_NOTHING = [
    "Apriel-1.6-15b-Thinker-fixed",
    "GigaChat3-10B-A1.8B",
    "Kimi-K2-Instruct",
    "LFM2-8B-A1B",
    "LFM2.5-8B-A1B",
    "MiMo-VL",
    "MiniMax-M1",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen3-Coder",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-4.0",
    "llama-cpp-deepseek-r1",
    "meta-llama-Llama-3.3-70B-Instruct",
    "unsloth-Apriel-1.5",
]


@pytest.fixture(scope="module")
def formatters(shared_dir: Path) -> dict[str, Formatter]:
    formatters = {}
    for path in sorted((shared_dir / "oracles" / "chat_templates").glob("*.jinja")):
        with path.open(newline="") as file:
            formatters[path.stem] = slm.formatter(template=file.read(), bos_token="<BOS>", eos_token="<EOS>")
    return formatters


def render(formatter: Formatter, messages: list[Any], **options: Any) -> str:
    return "".join(segment.text for segment in formatter.render(messages, **options))


def test_reasoning_can_be_switched_or_the_template_has_no_switch(formatters: dict[str, Formatter]) -> None:
    for name, formatter in formatters.items():
        if name in UNDERSTAND_NOTHING:
            for thinking in (True, False):
                with pytest.raises(TemplateError, match="cannot be asked for reasoning or for none"):
                    formatter.render(QUESTION, thinking=thinking)
            continue
        try:
            on, off = (render(formatter, QUESTION, thinking=thinking) for thinking in (True, False))
        except TemplateError as error:
            assert "cannot be asked" in str(error), f"{name}: {error}"
            source = "".join(formatter._template.constants)  # type: ignore[attr-defined]
            assert "enable_thinking" not in source, f"{name} has a switch"
            continue
        assert on != off, f"{name}: the prompt did not change"


@pytest.mark.parametrize(
    ("name", "option", "on", "off"),
    [
        ("deepseek-ai-DeepSeek-V3.1", "enable_thinking", True, False),
        ("ibm-granite-granite-3.3-2B-Instruct", "thinking", True, False),
        ("ByteDance-Seed-OSS", "thinking_budget", -1, 0),
        ("MiniMax-M3", "thinking_mode", "enabled", "disabled"),
        ("openai-gpt-oss-120b", "reasoning_effort", "medium", "low"),
        ("tencent-Hy3", "reasoning_effort", "high", "no_think"),
        ("upstage-Solar-Open-100B", "reasoning_effort", "high", "minimal"),
        ("Cohere2MoE", "reasoning", True, False),
        ("muse-glimmer", "reasoning_strength", "high", "low"),
    ],
)
def test_thinking_sets_the_variable_of_the_template(
    formatters: dict[str, Formatter], name: str, option: str, on: object, off: object
) -> None:
    for thinking, value in ((True, on), (False, off)):
        expected = render(formatters[name], QUESTION, **{option: value})
        assert render(formatters[name], QUESTION, thinking=thinking) == expected
    if option != "thinking":
        with pytest.raises(TemplateError, match=f"thinking and {option} are the same option"):
            formatters[name].render(QUESTION, thinking=True, **{option: on})


def test_a_word_in_the_question_switches_reasoning_if_the_template_removes_it(formatters: dict[str, Formatter]) -> None:
    formatter = formatters["NVIDIA-Nemotron-Nano-v2"]
    on, off = (render(formatter, QUESTION, thinking=thinking) for thinking in (True, False))
    assert on == render(formatter, QUESTION)
    assert off == render(formatter, [Message(Role.USER, "Hi /no_think")])
    assert "no_think" not in off
    assert off != on
    with pytest.raises(TemplateError, match="from a text, not from parts"):
        formatter.render([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], thinking=False)
    echo = slm.formatter(template="{{ messages[0].content }}{{ '/no_think' if false }}")
    with pytest.raises(TemplateError, match="cannot be asked"):
        echo.render(QUESTION, thinking=False)


def calls(arguments: object) -> list[dict[str, Any]]:
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "City"}}},
    },
}


def outcome(formatter: Formatter, messages: list[Any]) -> str | None:
    for tools in (None, [TOOL]):
        try:
            return render(formatter, messages, tools=tools, add_generation_prompt=False)
        except TemplateError:
            continue
    return None


def test_arguments_as_text_are_rendered_like_the_mapping(formatters: dict[str, Formatter]) -> None:
    n = 0
    for name, formatter in formatters.items():
        as_mapping = outcome(formatter, calls(ARGUMENTS))
        if as_mapping is not None:
            assert outcome(formatter, calls(json.dumps(ARGUMENTS, ensure_ascii=False))) == as_mapping, name
            n += "weather" in as_mapping
    print(f"{n} templates write calls")  # noqa: T201  # the count is part of the result
    assert n > 35


def test_templates_that_need_text_render_messages_with_calls(formatters: dict[str, Formatter]) -> None:
    formatter = formatters["meetkai-functionary-medium-v3.2"]
    call = ToolCall("weather", ARGUMENTS, id="call00001")
    messages = [QUESTION[0], Message(Role.ASSISTANT, "", tool_calls=[call])]
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    assert text in render(formatter, messages, tools=[TOOL])
    assert render(formatter, messages, tools=[TOOL]) == render(formatter, calls(text), tools=[TOOL])
    with pytest.raises(TemplateError, match="can only concatenate str"):
        formatter.render(calls(ARGUMENTS), tools=[TOOL])  # a mapping is passed on unchanged, like in transformers


def test_no_template_writes_a_call_as_python(formatters: dict[str, Formatter]) -> None:
    call = ToolCall("weather", ARGUMENTS, id="call00001")
    for name, formatter in formatters.items():
        prompt = outcome(formatter, [QUESTION[0], Message(Role.ASSISTANT, "", tool_calls=[call])]) or ""
        assert "{'city'" not in prompt, name


def test_text_that_is_not_a_json_object_is_passed_on(formatters: dict[str, Formatter]) -> None:
    formatter = formatters["Qwen-Qwen2.5-7B-Instruct"]
    for text in ("not JSON", "[1]", "[" * 100_000, ""):
        assert json.dumps(text, ensure_ascii=False) in render(formatter, calls(text))
