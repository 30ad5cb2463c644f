"""ChatML compared with the prompts of published ChatML models, and parsed back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slm_core.plugins import FormatterSource
from slm_core.types import Message, Role, ToolCall
from slm_formatters.families.chatml import chatml

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def render(messages: list[Message], **options: object) -> str:
    return "".join(segment.text for segment in chatml(FormatterSource()).render(messages, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["system_user", "multi_turn", "whitespace_unicode"])
def test_equals_qwen(shared_dir: Path, case: str) -> None:
    """Qwen 2.5 is plain ChatML for conversations with a system message and without tools."""
    path = shared_dir / "oracles" / "chat_templates" / "Qwen-Qwen2.5-7B-Instruct.json"
    published = {entry["case"]: entry for entry in json.loads(path.read_text())["cases"]}[case]
    messages = [Message(Role(message["role"]), message["content"]) for message in published["messages"]]
    assert render(messages) == published["expected"]


def test_a_rendered_call_is_parsed_back() -> None:
    calls = (ToolCall("add", {"a": 1, "b": [2.5, "</tool_call>", "é\n"]}), ToolCall("add", {}))
    for content, reasoning in (("", None), ("Wait.", "I must add."), ("Wait.", None)):
        answer = Message(Role.ASSISTANT, content, reasoning=reasoning, tool_calls=calls)
        question = Message(Role.USER, "1+2?")
        before = render([question], tools=[ADD])
        rendered = render([question, answer], tools=[ADD], add_generation_prompt=False)
        assert rendered.startswith(before)
        assert chatml(FormatterSource()).parse(rendered.removeprefix(before).removesuffix("<|im_end|>\n")) == answer


def test_thinking_begins_or_ends_reasoning() -> None:
    question = [Message(Role.USER, "hi")]
    assert render(question, thinking=True).endswith("<|im_start|>assistant\n<think>\n")
    assert render(question, thinking=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert render(question).endswith("<|im_start|>assistant\n")


def test_answers_stop_at_the_end_of_a_turn() -> None:
    assert chatml(FormatterSource()).stops == ("<|im_end|>",)
