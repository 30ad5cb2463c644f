"""Known answer formats by name, for templates from which the format cannot be detected."""

from __future__ import annotations

import re
from typing import TypeAlias

from slm_formatters.parsers.answer import THINK, AnswerFormat, CallSyntax
from slm_formatters.parsers.channels import ChannelFormat
from slm_formatters.parsers.json_calls import JsonCalls
from slm_formatters.parsers.named_calls import Field, NamedCalls
from slm_formatters.parsers.python_calls import PythonCalls
from slm_formatters.parsers.python_tag import PythonTag
from slm_formatters.parsers.tagged import BareKeyArguments, NestedArguments, TaggedArguments

Format: TypeAlias = AnswerFormat | ChannelFormat

_NAME, _ID = Field.NAME, Field.ID
_CALL = ("<tool_call>", "</tool_call>")
_LLAMA_ENDS = ("<|eom_id|>", "<|eot_id|>")
_PADDED = TaggedArguments("<parameter=", ">", "</parameter>", padded=True, closing=("</function>", "</tool_call>"))
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")


def _json(name: str, begin: str, end: str, *dropped: str, listed: bool = False) -> AnswerFormat:
    return AnswerFormat(name, CallSyntax(JsonCalls(listed=listed), begin, end), dropped=dropped)


def _xml(mark: str = "", section: str = "", *, typed: bool = False) -> NamedCalls:
    """``name="NAME"><parameter name="KEY">VALUE</parameter>``, with a mark in each tag."""
    key_end, text_key_end = ('" string="false">', '" string="true">') if typed else ('">', "")
    closing = (f"</{mark}invoke>", section)
    end = f"</{mark}parameter>"
    return NamedCalls(
        ('name="', _NAME, '">'),
        TaggedArguments(f'<{mark}parameter name="', key_end, end, text_key_end, closing=closing),
    )


NONE = AnswerFormat("none")
JSON = AnswerFormat("json", bare=JsonCalls(bare=True))
PYTHONIC = AnswerFormat("pythonic", bare=PythonCalls(bare=True))
HERMES = _json("hermes", *_CALL)
GRANITE = _json("granite", *_CALL, "<|end_of_text|>")
GRANITE3 = _json("granite3", "<|tool_call|>", "", "<|end_of_text|>", "<response>", "</response>", listed=True)
PHI4 = _json("phi4", "<|tool_call|>", "<|/tool_call|>", "<|end|>", listed=True)
NEMOTRON = _json("nemotron", "<TOOLCALL>", "</TOOLCALL>", listed=True)
MINIMAX = _json("minimax", "<tool_calls>", "</tool_calls>")
COMMAND_R = AnswerFormat(
    "command_r",
    CallSyntax(JsonCalls(), "<|START_ACTION|>", "<|END_ACTION|>"),
    reasoning=(("<|START_THINKING|>", "<|END_THINKING|>"),),
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|END_OF_TURN_TOKEN|>"),
)
COMMAND_R_JSON = AnswerFormat("command_r_json", CallSyntax(JsonCalls(), "Action: ```json", "```"))
LLAMA3 = AnswerFormat(
    "llama3",
    CallSyntax(PythonTag(_LLAMA_ENDS), "<|python_tag|>"),
    bare=JsonCalls(arguments="parameters", bare=True),
    dropped=_LLAMA_ENDS,
)
MISTRAL = AnswerFormat(
    "mistral",
    CallSyntax(
        NamedCalls((_NAME, ("[CALL_ID]", _ID), ("[ARGS]",)), or_json=True),
        "[TOOL_CALLS]",
    ),
    reasoning=(("[THINK]", "[/THINK]"), THINK),
    dropped=("</s>",),
)
QWEN3_CODER = AnswerFormat(
    "qwen3_coder",
    CallSyntax(NamedCalls(("<function=", _NAME, ">"), _PADDED), "<tool_call>", "</function> </tool_call>"),
)
GLM = AnswerFormat(
    "glm",
    CallSyntax(
        NamedCalls(
            (_NAME,),
            TaggedArguments("<arg_key>", "</arg_key> <arg_value>", "</arg_value>", closing=("</tool_call>",)),
        ),
        *_CALL,
    ),
)
DEEPSEEK_V3 = AnswerFormat(
    "deepseek_v3",
    CallSyntax(
        NamedCalls((("function", "<｜tool▁sep｜>"), _NAME, "```json")),
        _DEEPSEEK[0],
        "```" + _DEEPSEEK[1],
        _DEEPSEEK_SECTION,
    ),
    dropped=("<｜end▁of▁sentence｜>",),
)
DEEPSEEK_V3_1 = AnswerFormat(
    "deepseek_v3_1",
    CallSyntax(NamedCalls((_NAME, "<｜tool▁sep｜>"), or_json=True), *_DEEPSEEK, section=_DEEPSEEK_SECTION),
    dropped=("<｜end▁of▁sentence｜>",),
)
KIMI = AnswerFormat(
    "kimi",
    CallSyntax(
        NamedCalls((Field.NUMBERED, "<|tool_call_argument_begin|>")),
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    dropped=("<|im_end|>",),
)
DEEPSEEK_V4 = AnswerFormat(
    "deepseek_v4",
    CallSyntax(
        _xml("｜DSML｜", "</｜DSML｜tool_calls>", typed=True),
        "<｜DSML｜invoke",
        "</｜DSML｜invoke>",
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ),
    dropped=("<｜end▁of▁sentence｜>",),
)
MINIMAX_M2 = AnswerFormat(
    "minimax_m2",
    CallSyntax(
        _xml(section="</minimax:tool_call>"), "<invoke", "</invoke>", ("<minimax:tool_call>", "</minimax:tool_call>")
    ),
)
FUNCTIONARY = AnswerFormat(
    "functionary",
    CallSyntax(NamedCalls((_NAME, ">"), or_json=True), "<function=", "</function>"),
    dropped=_LLAMA_ENDS,
)
GEMMA = AnswerFormat(
    "gemma",
    CallSyntax(PythonCalls(), "```tool_code", "```"),
    dropped=("<end_of_turn>",),
)
GEMMA4 = AnswerFormat(
    "gemma4",
    CallSyntax(NamedCalls((_NAME,), BareKeyArguments('<|"|>')), "<|tool_call>call:", "<tool_call|>"),
    reasoning=(("<|channel>thought", "<channel|>"),),
    dropped=("<turn|>",),
)
LFM2 = AnswerFormat("lfm2", CallSyntax(PythonCalls(), "<|tool_call_start|>", "<|tool_call_end|>"))
APERTUS = AnswerFormat(
    "apertus",
    CallSyntax(JsonCalls(keyed=True), "<|tools_prefix|>", "<|tools_suffix|>"),
    reasoning=(("<|inner_prefix|>", "<|inner_suffix|>"),),
    dropped=("<|assistant_end|>",),
)
MINIMAX_M3 = AnswerFormat(
    "minimax_m3",
    CallSyntax(
        NamedCalls(("name=", '"', _NAME, '">'), NestedArguments("]<]minimax[>[")),
        "]<]minimax[>[<invoke",
        "]<]minimax[>[</invoke>",
        ("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
    ),
    reasoning=(("<mm:think>", "</mm:think>"),),
)
HARMONY = ChannelFormat(
    "harmony",
    start="<|start|>",
    header_end="<|message|>",
    ends=("<|end|>", "<|return|>", "<|call|>"),
    opens=("<|channel|>", "to=", "<|start|>"),
    reasoning=re.compile(r"^(?!.*\bto=).*<\|channel\|>analysis", re.DOTALL),
    call=re.compile(r"\bto=(?:functions\.)?(?P<name>[^\s<]+)"),
    code=frozenset({"python"}),
    shown_by=("<|channel|>final<|message|>",),
)
FUNCTIONARY_V3_2 = ChannelFormat(
    "functionary_v3_2",
    start=">>>",
    header_end="\n",
    ends=("<|eot_id|>",),
    opens=(),
    reasoning=re.compile(r"(?!)"),
    call=re.compile(r"^(?!all$)(?P<name>\S+)"),
    code=frozenset({"python"}),
    shown_by=(">>>all\n",),
)

FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        NONE,
        JSON,
        PYTHONIC,
        HERMES,
        GRANITE,
        GRANITE3,
        PHI4,
        NEMOTRON,
        MINIMAX,
        COMMAND_R,
        COMMAND_R_JSON,
        LLAMA3,
        MISTRAL,
        QWEN3_CODER,
        GLM,
        DEEPSEEK_V3,
        DEEPSEEK_V3_1,
        KIMI,
        DEEPSEEK_V4,
        MINIMAX_M2,
        FUNCTIONARY,
        GEMMA,
        GEMMA4,
        LFM2,
        APERTUS,
        MINIMAX_M3,
        HARMONY,
        FUNCTIONARY_V3_2,
    )
}
"""All known formats."""
