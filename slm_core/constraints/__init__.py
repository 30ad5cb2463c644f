"""Constraints of answers: grammars, schemas, regular expressions and choices, compiled by llguidance."""

from slm_core.constraints.deserialize import spec_from_dict
from slm_core.constraints.limits import Limits
from slm_core.constraints.matcher import GrammarConstraint, compile, restore  # noqa: A004  (as in re.compile)
from slm_core.constraints.specs import (
    AfterThinking,
    AnyJson,
    AnyOf,
    Choice,
    Gbnf,
    JsonSchema,
    Lark,
    Regex,
    Spec,
    Triggered,
)
from slm_core.constraints.toolcalls import NoToolCalls, ToolCalls

__all__ = [
    "AfterThinking",
    "AnyJson",
    "AnyOf",
    "Choice",
    "Gbnf",
    "GrammarConstraint",
    "JsonSchema",
    "Lark",
    "Limits",
    "NoToolCalls",
    "Regex",
    "Spec",
    "ToolCalls",
    "Triggered",
    "compile",
    "restore",
    "spec_from_dict",
]
