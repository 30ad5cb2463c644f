"""The plugin of this package; it imports nothing heavy."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from slm_core.hookspecs import Entry, hookimpl

_FAMILIES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("alpaca", "alpaca", ()),
    ("chatml", "chatml", ("<|im_start|>", "<|im_end|>")),
    ("command_r", "command_r", ("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>")),
    ("command_r7b", "command_r7b", ("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>")),
    ("deepseek_r1", "deepseek", ()),
    ("deepseek_v2", "deepseek", ()),
    ("deepseek_v3", "deepseek", ("<｜User｜>", "<｜Assistant｜>")),
    ("gemma", "gemma", ("<start_of_turn>", "<end_of_turn>")),
    ("gemma3", "gemma3", ("<start_of_turn>", "<end_of_turn>", "<start_of_image>")),
    ("gemma4", "gemma4", ("<|turn>", "<turn|>")),
    ("gpt_oss", "gpt_oss", ("<|start|>", "<|message|>", "<|channel|>")),
    ("granite", "granite", ("<|start_of_role|>", "<|end_of_role|>")),
    ("granite4", "granite", ()),
    ("llama2", "llama2", ()),
    ("llama3", "llama3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    ("llama3_1", "llama3", ()),
    ("mistral_tekken", "mistral", ("[INST]", "[/INST]", "[TOOL_CALLS]", "[PREFIX]")),
    ("mistral_v1", "mistral", ()),
    ("mistral_v3", "mistral", ("[INST]", "[/INST]", "[TOOL_CALLS]")),
    ("mistral_v7", "mistral", ("[INST]", "[/INST]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")),
    ("phi3", "phi3", ("<|user|>", "<|assistant|>", "<|end|>")),
    ("phi4", "phi4", ("<|im_start|>", "<|im_sep|>", "<|im_end|>")),
    ("qwen2_5", "qwen2_5", ()),
    ("qwen3", "qwen3", ("<|im_start|>", "<|im_end|>", "<tool_call>", "<think>")),
    ("rwkv_world", "rwkv_world", ("<|rwkv_tokenizer_end_of_text|>",)),
    ("smollm", "smollm", ()),
    ("vicuna", "vicuna", ()),
    ("zephyr", "zephyr", ()),
)
"""Names, modules, and the control tokens that identify the family of a vocabulary, if it has any."""

_ANSWER_FORMATS = (
    *("apertus", "command_r", "command_r_json", "deepseek_v3", "deepseek_v3_1", "deepseek_v4", "functionary"),
    *("functionary_v3_2", "gemma", "gemma4", "glm", "granite", "granite3", "harmony", "hermes", "json", "kimi", "lfm2"),
    *("llama3", "minimax", "minimax_m2", "minimax_m3", "mistral", "nemotron", "none", "phi4", "pythonic"),
    "qwen3_coder",
)


@hookimpl
def slm_formatters() -> Sequence[Entry]:
    """The model's template, and the families."""
    template = Entry("template", "slm_formatters.template:TemplateFormatter")
    named = (
        Entry(name, f"slm_formatters.families.{module}:{name}", tokens=tokens) for name, module, tokens in _FAMILIES
    )
    return [template, *named]


@hookimpl
def slm_answer_formats() -> Sequence[Entry]:
    """The known answer formats."""
    return [Entry(name, functools.partial(_answer_format, name)) for name in _ANSWER_FORMATS]


def _answer_format(name: str) -> object:
    from slm_formatters.parsers.formats import FORMATS

    return FORMATS[name]
