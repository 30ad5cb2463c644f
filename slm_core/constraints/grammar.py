"""Builds llguidance's grammar from a spec and a vocabulary: a list of grammars that refer to each other."""

from __future__ import annotations

import json
from typing import Any

from slm_core.constraints.errors import check_grammar, regex_error
from slm_core.constraints.freetext import FreeText
from slm_core.constraints.gbnf import gbnf_to_lark
from slm_core.constraints.lark import Opening, between_slashes, escaped, sequence
from slm_core.constraints.limits import Limits
from slm_core.constraints.multiples import check_multiples
from slm_core.constraints.schema import lower_schema
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
from slm_core.constraints.tokens import TokenTable
from slm_core.constraints.toolcalls import NoToolCalls, ToolCalls, named_parameters, object_schema
from slm_core.errors import ConstraintError
from slm_core.protocols import Vocab
from slm_core.types import CallFormat

_WHITE = r"\x20|\x0A[\x20\x09]{0,20}"
"""White space in JSON, bounded: without a bound, a weak model fills its answer with white space."""
_ESCAPES = 'nrbtf\\"'
"""Escapes without ``u``: otherwise a name could be spelled in several ways."""
_NO_CALL = r"TEXT: /[^{\[](?s:.*)/"
"""The rule for other text if a call is a whole answer: the text does not begin like a call."""
_SPACE = r"WHITE: /[\x20\x0A\x0D\x09]{1,8}/"


class GrammarBuilder:
    """Writes the grammar of one spec.

    Args:
        vocab: the vocabulary.
        table: the table of the same vocabulary.
        limits: the limits on the spec.

    Attributes:
        free: the state before the free text, if the answer begins with free text.
    """

    def __init__(self, vocab: Vocab, table: TokenTable, limits: Limits) -> None:
        self._vocab = vocab
        self._table = table
        self._limits = limits
        self._grammars: list[dict[str, Any]] = []
        self._depth = 0
        self.free: FreeText | None = None

    def build(self, spec: Spec) -> str:
        """The grammar as JSON text.

        Raises:
            ConstraintError: the spec is invalid, unsupported or beyond the limits.
        """
        self._grammar(spec)
        check_multiples(self._grammars, self._limits.multiples)
        return json.dumps({"grammars": self._grammars})

    def _grammar(self, spec: Spec) -> str:
        """Add the grammar of a spec; returns a reference to it for rules."""
        self._depth += 1
        if self._depth > self._limits.depth:
            raise ConstraintError(f"specs nest deeper than {self._limits.depth}")
        entry: dict[str, Any] = {"name": f"g{len(self._grammars)}"}
        self._grammars.append(entry)
        entry |= self._body(spec)
        self._depth -= 1
        return f"@{entry['name']}"

    def _body(self, spec: Spec) -> dict[str, Any]:
        match spec:
            case JsonSchema(schema=text, compact=compact):
                return _json(lower_schema(json.loads(self._sized(text)), self._limits), compact=compact)
            case AnyJson(compact=compact):
                return _json({}, compact=compact)
            case Regex(pattern=pattern):
                return _regex(self._sized(pattern))
            case Lark(grammar=text):
                self._check_rules(sum(":" in line for line in self._sized(text).splitlines()))
                self._check_inline(text)
                check_multiples([_lark(text)], self._limits.multiples)
                check_grammar(_lark(text))
                return _lark(text)
            case Gbnf(grammar=text, root=root):
                self._check_rules(self._sized(text).count("::="))
                return _lark(gbnf_to_lark(text, root, self._limits.depth))
            case Choice(options=options):
                return _lark(f"start: /{'|'.join(escaped(self._sized(option)) for option in options)}/")
            case AnyOf(specs=specs):
                self._check_rules(len(specs))
                return _lark(f"start: {' | '.join(map(self._grammar, specs))}")
            case Triggered() | AfterThinking():
                return _lark(self._after_free_text(spec))
            case ToolCalls():
                return _lark(self._tool_calls(spec))
            case NoToolCalls(format=form):
                return _lark(self._no_tool_calls(form))
        raise ConstraintError(f"{type(spec).__name__} is not a spec that can be compiled")

    def _sized(self, text: str) -> str:
        if len(text) > self._limits.text:
            raise ConstraintError(f"{len(text)} characters of grammar (accepted: up to {self._limits.text})")
        return text

    def _check_rules(self, n_rules: int) -> None:
        if n_rules > self._limits.rules:
            raise ConstraintError(f"{n_rules} rules of a grammar (accepted: up to {self._limits.rules})")

    def _check_inline(self, text: str) -> None:
        """Refuse a Lark grammar whose inline schemas may nest too deep; escapes may hide a reference."""
        n_references = text.count("$ref") + text.count("\\u")
        opened = deepest = 0
        for char in text:
            opened += (char in "{[(") - (char in "}])")
            deepest = max(deepest, opened)
        if deepest * n_references > self._limits.levels:
            raise ConstraintError(f"{n_references} references and {deepest} levels of inline schemas are too many")

    def _after_free_text(self, spec: Triggered | AfterThinking) -> str:
        inner = self._grammar(spec.spec)
        if isinstance(spec, AfterThinking):
            marker, start = spec.end, f"start: free opening WHITE? {inner}"
        else:
            marker = spec.marker
            start = f"start: free opening {inner}" if spec.required else f"start: free (opening {inner} | TEXT?)"
        opening = self._opening(marker)
        return f"{start}\n{opening.rules(self._table.control)}{_SPACE}"

    def _tool_calls(self, spec: ToolCalls) -> str:
        form = spec.format
        for tool in spec.tools:
            self._sized(tool)
        calls = self._calls(spec)
        if not form.begin:
            return f"start: {calls}\n{_SPACE}" if spec.required else _whole_answer(calls)
        outer_begin, outer_end = form.section
        begin, end = self._literal(form.begin), self._closing(form.end)
        again = f"(WHITE? {begin} WHITE? ({calls}) {end})*" if form.repeats else ""
        # Everything after the opening of a block, or of a section of blocks, to its end.
        after_opening = f"WHITE? ({calls}) {end} {again} {self._closing(outer_end)}"
        after_opening = f"WHITE? {begin} {after_opening}" if outer_begin else after_opening
        if spec.required:
            return f"start: {self._literal(outer_begin or form.begin)} {after_opening}\n{_SPACE}"
        opening = self._opening(outer_begin or form.begin)
        start = f"start: free (opening {after_opening} | TEXT?)"
        if form.repeats and not outer_begin:
            start = f"start: (free opening {after_opening})* free TEXT?"  # text may stand between blocks
        return f"{start}\n{opening.rules(self._table.control)}{_SPACE}"

    def _no_tool_calls(self, form: CallFormat) -> str:
        if not form.begin:
            return f"start: TEXT?\n{_NO_CALL}"
        return f"start: free TEXT?\n{self._opening(form.section[0] or form.begin).rules(self._table.control)}"

    def _opening(self, text: str) -> Opening:
        opening = Opening(text, self._vocab, self._table)
        if self._depth == 1:
            self.free = FreeText(opening.text.encode(), opening.token)
        return opening

    def _literal(self, text: str) -> str:
        return sequence(text, self._vocab, self._table)

    def _closing(self, text: str) -> str:
        return f"WHITE? {self._literal(text)}" if text else ""

    def _calls(self, spec: ToolCalls) -> str:
        """The calls between ``begin`` and ``end``, as an expression."""
        style = spec.format.style
        if style == "named":
            before, between = spec.format.before, spec.format.between
            return " | ".join(
                f"{self._literal(before + name + between)} WHITE? {self._schema(lowered)}"
                for name, lowered in named_parameters(spec, self._limits)
            )
        schema = object_schema(spec, self._limits)
        if style == "array":
            calls = {"type": "array", "minItems": 1, "items": {"anyOf": schema.pop("anyOf")}}
            schema |= calls
        return self._schema(schema)

    def _schema(self, schema: Any) -> str:
        entry = {"name": f"g{len(self._grammars)}", **_json(schema, compact=False)}
        self._grammars.append(entry)
        return f"@{entry['name']}"


def _whole_answer(calls: str) -> str:
    """The answer is a call, or a text that does not begin like a call."""
    return f"start: {calls} | TEXT?\n{_NO_CALL}\n{_SPACE}"


def _lark(text: str) -> dict[str, Any]:
    return {"lark_grammar": text}


def _json(schema: Any, *, compact: bool) -> dict[str, Any]:
    white = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITE}
    body = {"allOf": [schema]} if isinstance(schema, bool) else schema
    return {"json_schema": {**body, "x-guidance": {**white, "json_allowed_escapes": _ESCAPES}}}


def _regex(pattern: str) -> dict[str, Any]:
    fit, origins = between_slashes(pattern)
    body = _lark(f"start: /{fit}/")
    check_grammar(body, lambda message: regex_error(message, pattern, origins))
    return body
