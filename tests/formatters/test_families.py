"""Named families compared with official templates if available, else with published prompts."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import slm_core as slm
from slm_core.errors import TemplateError
from slm_core.hookspecs import Entry
from slm_core.plugins import Registry, registry
from slm_core.types import Message, Role
from slm_formatters import plugin

OFFICIAL = {
    "command_r7b": "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "deepseek_r1": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek_v3": "deepseek-ai-DeepSeek-V3.1",
    "gemma": "google-gemma-2-2b-it",
    "gemma4": "google-gemma-4-31B-it-interleaved",
    "gpt_oss": "openai-gpt-oss-120b",
    "granite": "ibm-granite-granite-3.3-2B-Instruct",
    "granite4": "ibm-granite-granite-4.0",
    "llama3": "meta-llama-Llama-3.2-3B-Instruct",
    "llama3_1": "meta-llama-Llama-3.3-70B-Instruct",
    "mistral_tekken": "mistralai-Mistral-Nemo-Instruct-2407",
    "qwen2_5": "Qwen-Qwen2.5-7B-Instruct",
}

MESSAGES = [
    Message(Role.SYSTEM, "Be terse."),
    Message(Role.USER, "Hi"),
    Message(Role.ASSISTANT, " Hello "),
    Message(Role.USER, "Bye"),
]
PUBLISHED = {
    "alpaca": "<s>Be terse.\n\n### Instruction:\nHi\n\n### Response:\n Hello </s>\n\n"
    "### Instruction:\nBye\n\n### Response:\n",
    "chatml": "<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n Hello <|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "command_r": "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be terse.<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Hello<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Bye<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "deepseek_v2": "<s>Be terse.\n\nUser: Hi\n\nAssistant:  Hello </s>User: Bye\n\nAssistant:",
    "gemma3": "<s><start_of_turn>user\nBe terse.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "llama2": "<s>[INST] <<SYS>>\nBe terse.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] Bye [/INST]",
    "mistral_v1": "<s> [INST] Be terse.\n\nHi [/INST]  Hello </s> [INST] Bye [/INST]",
    "mistral_v3": "<s>[INST] Hi[/INST] Hello</s>[INST] Be terse.\n\nBye[/INST]",
    "mistral_v7": "<s>[SYSTEM_PROMPT] Be terse.[/SYSTEM_PROMPT][INST] Hi[/INST]  Hello </s>[INST] Bye[/INST]",
    "phi3": "<|system|>\nBe terse.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n Hello <|end|>\n<|user|>\nBye<|end|>\n"
    "<|assistant|>\n",
    "phi4": "<|im_start|>system<|im_sep|>Be terse.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
    "<|im_start|>assistant<|im_sep|> Hello <|im_end|><|im_start|>user<|im_sep|>Bye<|im_end|>"
    "<|im_start|>assistant<|im_sep|>",
    "qwen3": "<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n Hello <|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "rwkv_world": "<s>System: Be terse.\n\nUser: Hi\n\nAssistant: Hello\n\nUser: Bye\n\nAssistant:",
    "smollm": "<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n Hello <|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "vicuna": "<s>Be terse. USER: Hi ASSISTANT:  Hello </s>USER: Bye ASSISTANT:",
    "zephyr": "<|system|>\nBe terse.</s>\n<|user|>\nHi</s>\n<|assistant|>\n Hello </s>\n"
    "<|user|>\nBye</s>\n<|assistant|>\n",
}
QUESTION = {
    "alpaca": "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\nHi\n\n### Response:\n",
    "chatml": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "gemma3": "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "llama2": "[INST] Hi [/INST]",
    "mistral_v3": "[INST] Hi[/INST]",
    "qwen3": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "smollm": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "vicuna": "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions. USER: Hi ASSISTANT:",
}


def render(name: str, messages: list[Message], **options: Any) -> str:
    formatter = slm.formatter(name=name, bos_token="<s>", eos_token="</s>")
    return "".join(segment.text for segment in formatter.render(messages, **options))


def outcome(formatter: Any, case: dict[str, Any]) -> str:
    try:
        segments = formatter.render(
            case["messages"],
            tools=case["tools"],
            add_generation_prompt=case["add_generation_prompt"],
            **case["kwargs"],
        )
    except TemplateError as error:
        return f"error: {error}"
    return "".join(segment.text for segment in segments)


def agrees(actual: str, case: dict[str, Any]) -> bool:
    """Whether the outcome is equal, or is an error, with the template's message if the template raises it."""
    if "error" not in case:
        return bool(actual == case["expected"])
    kind, _, words = case["error"].partition(": ")
    return actual.startswith("error: ") and (kind != "TemplateError" or words in actual)


@pytest.mark.parametrize("name", OFFICIAL)
def test_equals_the_official_template_in_every_shared_case(shared_dir: Path, name: str) -> None:
    collection = json.loads((shared_dir / "oracles" / "chat_templates" / f"{OFFICIAL[name]}.json").read_text())
    now = datetime.fromisoformat(collection["now"])
    formatter = slm.formatter(name=name, bos_token="<BOS>", eos_token="<EOS>", now=now)
    assert len(collection["cases"]) == 18
    for case in collection["cases"]:
        actual = outcome(formatter, case)
        assert agrees(actual, case), f"{case['case']}:\n{actual}\n{case.get('expected', case.get('error'))}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_prompt_equals_the_published_prompt(name: str) -> None:
    assert render(name, MESSAGES) == PUBLISHED[name]


@pytest.mark.parametrize("name", QUESTION)
def test_a_question_alone_has_the_default_system_message(name: str) -> None:
    assert render(name, MESSAGES[1:2]).removeprefix("<s>") == QUESTION[name]


def test_every_family_is_tested() -> None:
    assert {entry.name for entry in plugin.slm_formatters()} == {"template", *OFFICIAL, *PUBLISHED}


def test_qwen3_keeps_reasoning_only_after_the_last_question() -> None:
    thought = Message(Role.ASSISTANT, "A", reasoning="why")
    before, after = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n"
    assert render("qwen3", [MESSAGES[1], thought], add_generation_prompt=False) == (
        f"{before}<think>\nwhy\n</think>\n\nA{after}"
    )
    assert render("qwen3", [MESSAGES[1], thought, MESSAGES[1]]) == f"{before}A{after}{before}"
    inline = Message(Role.ASSISTANT, "<think>\nwhy\n</think>\n\nA")
    assert render("qwen3", [MESSAGES[1], inline, MESSAGES[1]]) == f"{before}A{after}{before}"
    assert render("qwen3", [MESSAGES[1]], thinking=False) == f"{before}<think>\n\n</think>\n\n"
    assert render("qwen3", [MESSAGES[1]], thinking=True) == before


def test_rwkv_world_reasons_on_request() -> None:
    assert render("rwkv_world", [MESSAGES[1]], thinking=True).endswith("\n\nAssistant: <think>")
    assert render("rwkv_world", [MESSAGES[1]], thinking=False).endswith("\n\nAssistant: <think>\n</think>")


def test_mistral_v3_with_tools() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "F", "parameters": {"type": "object"}}}
    call = slm.ToolCall("f", {"x": 1}, id="abcdefghi")
    messages = [
        Message(Role.USER, "Hi"),
        Message(Role.ASSISTANT, "", tool_calls=[call]),
        Message(Role.TOOL, "7", tool_call_id="abcdefghi"),
    ]
    assert render("mistral_v3", messages, tools=[tool]) == (
        '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "f", "description": "F", "parameters": '
        '{"type": "object"}}}][/AVAILABLE_TOOLS][INST] Hi[/INST][TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, '
        '"id": "abcdefghi"}]</s>[TOOL_RESULTS] {"content": 7, "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    )
    with pytest.raises(TemplateError, match="alphanumeric strings with length 9"):
        render("mistral_v3", [messages[0], Message(Role.ASSISTANT, "", tool_calls=[slm.ToolCall("f", {}, id="1")])])


@pytest.mark.parametrize("name", ["command_r", "gemma3", "llama2", "mistral_v1", "mistral_v3"])
def test_turns_must_alternate_if_the_official_template_requires_it(name: str) -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render(name, [MESSAGES[1], MESSAGES[1]])


def test_names_are_found_in_any_notation() -> None:
    for spelled, name in (("Qwen2.5", "qwen2_5"), ("GPT-OSS", "gpt_oss"), ("Llama 3", "llama3"), ("chatml", "chatml")):
        assert slm.formatter(name=spelled).name == name
    with pytest.raises(TemplateError, match=r"unknown chat format 'qwen9' \(registered: alpaca, chatml, .*zephyr\)"):
        slm.formatter(name="qwen9")


@pytest.mark.parametrize(
    ("vocabulary", "name"),
    [("gemma-4", "gemma4"), ("qwen2", "chatml"), ("phi-3", "phi3"), ("llama-bpe", "llama3"), ("gpt-2", None)],
)
def test_families_are_detected_from_vocabularies(
    shared_dir: Path, vocabulary: str, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = shared_dir / "oracles" / "vocabs" / f"ggml-vocab-{vocabulary}.gguf"
    vocab = slm.load_vocab(path)
    guessed = registry().guess_formatter(
        lambda text: len(vocab.encode(text, add_special=False, parse_special=True)) == 1
    )
    assert guessed == name


def test_the_format_with_most_tokens_is_guessed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    entries = {entry.name: entry for entry in plugin.slm_formatters() if isinstance(entry, Entry) and entry.tokens}
    known = Registry({"formatters": plugin})
    for name, entry in entries.items():
        assert known.guess_formatter(set(entry.tokens).__contains__) == name
    assert known.guess_formatter(lambda text: False) is None
