"""Mutants that break constraints."""

from __future__ import annotations

import json
from typing import Any

from slm_conformance.mutants.above import breaks
from slm_core import constraints
from slm_core.constraints import GrammarConstraint, grammar, lark, toolcalls
from slm_core.constraints.tokens import TokenTable
from slm_core.errors import InvalidToken
from slm_core.protocols import Advance, FastForward, Forward, Vocab

# ruff: noqa: N802, SLF001  (functions become backends and are named like classes; mutants change internals)


@breaks("TestConstraints::test_what_is_said_fits", grammar, "lower_schema")
def BoundsAreDropped(original: Any, schema: Any, *args: Any) -> Any:
    """``maxLength`` in a schema is ignored."""
    lowered = original(schema, *args)
    return json.loads(json.dumps(lowered).replace('"maxLength"', '"x-longest"'))


@breaks("TestConstraints::test_the_end_exactly_when_complete", TokenTable, "allowed")
def NeverAnEnd(original: Any, table: TokenTable, parser: Any) -> Any:
    """An answer cannot end while the constraint allows more text."""
    return original(table, parser) & table._without_eog


@breaks("TestConstraints::test_what_may_not_follow", GrammarConstraint, "advance")
def RefusedTokensCount(original: Any, rule: GrammarConstraint, token: int) -> Advance:
    """A refused token is recorded among the consumed tokens."""
    try:
        advance: Advance = original(rule, token)
    except InvalidToken:
        rule._tokens.append(token)
        raise
    return advance


@breaks("TestConstraints::test_what_is_forced_is_one_batch", GrammarConstraint, "advance")
def ForcedTokensAreKeptBack(original: Any, rule: GrammarConstraint, token: int) -> Advance:
    """Forced tokens are allowed, but not returned for fast-forward."""
    advance: Advance = original(rule, token)
    return Forward() if isinstance(advance, FastForward) else advance


@breaks("TestConstraints::test_free_text_is_free", lark, "without")
def FreeTextIsLetters(original: Any, text: str) -> str:
    """Free text must not contain digits."""
    return f"{original(text)} & ~/(?s:.*)[0-9](?s:.*)/"


@breaks("TestConstraints::test_tool_calls", toolcalls, "lower_schema")
def ArgumentsAreAnything(original: Any, *args: Any) -> Any:
    """The arguments of a tool call may be any JSON object."""
    original(*args)
    return {"type": "object"}


@breaks("TestConstraints::test_dumped_in_mid_grammar", constraints, "restore")
def RestoredAtTheBeginning(original: Any, vocab: Vocab, state: bytes) -> GrammarConstraint:
    """A restored constraint reports its state correctly, but allows the tokens of the grammar's start."""
    restored: GrammarConstraint = original(vocab, state)
    restored._matcher = restored._prototype.matcher.deep_copy()
    restored._bits = None
    return restored
