"""Limits on the work of a constraint, because grammars and schemas can be untrusted."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from slm_core.errors import InvalidOption

if TYPE_CHECKING:
    from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on compiling a constraint and on each mask; exceeding one raises ``ConstraintError``.

    The last five are limits of llguidance's parser, in its units.

    Attributes:
        text: characters of a grammar, schema or expression.
        depth: nesting depth of schemas, groups and specs.
        rules: rules of a grammar. llguidance follows rules recursively, and overflows its stack after about 2,500.
        levels: the sum of the nesting depths of a schema and of every schema that it refers to. llguidance overflows
            its stack after about 2,000.
        multiples: states for the remainders of ``multipleOf``: the sum of the divisors without decimal points, or their
            least common multiple in a schema that combines others (100 take about a millisecond).
        grammar: symbols of the compiled grammar.
        compile_work: nodes of regular expressions built while compiling (50,000 take about a millisecond).
        mask_work: nodes of regular expressions built for one mask (14,000 take about a millisecond).
        mask_items: parser items of one mask (20,000 take about a millisecond).
        lexer_states: states of the lexer in memory (one to two kilobytes each).
    """

    text: int = 262_144
    depth: int = 64
    rules: int = 1000
    levels: int = 500
    multiples: int = 10_000
    grammar: int = 25_000
    compile_work: int = 1_000_000
    mask_work: int = 200_000
    mask_items: int = 20_000
    lexer_states: int = 50_000

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidOption(f"limit {one.name}={value!r} (accepted: an integer from 1 on)")

    def for_parser(self) -> LLParserLimits:
        """The limits of llguidance's parser."""
        from llguidance import LLParserLimits

        return LLParserLimits(
            max_grammar_size=self.grammar,
            initial_lexer_fuel=self.compile_work,
            step_lexer_fuel=self.mask_work,
            step_max_items=self.mask_items,
            max_lexer_states=self.lexer_states,
            verbose_errors=False,
        )
