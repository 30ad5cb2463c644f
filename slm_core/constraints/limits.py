"""How much work a constraint may be: grammars and schemas come from anybody."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from slm_core.errors import InvalidOption

if TYPE_CHECKING:
    from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on compiling a constraint and on each mask; exceeding one raises ``ConstraintError``.

    The last five are those of llguidance's parser, in its own units.

    Attributes:
        text: characters of a grammar, schema or expression.
        depth: how deep schemas, groups and specs may nest.
        rules: rules of a grammar. llguidance follows them by recursion, and overflows its stack after some 2,500.
        levels: levels of a schema along its references: its own and those of every schema that one refers to, added
            up. The same, after some 2,000.
        multiples: remainders that ``multipleOf`` has to follow: the sum of divisors without decimal points, and in
            a schema that combines others their least common multiple (about 100 take a millisecond).
        grammar: symbols of the compiled grammar.
        compile_work: nodes of regular expressions built while compiling (about 50,000 take a millisecond).
        mask_work: the same for one mask (about 14,000 take a millisecond).
        mask_items: parser items of one mask (about 20,000 take a millisecond).
        lexer_states: states kept (one to two kilobytes each).
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
        """The same for llguidance."""
        from llguidance import LLParserLimits

        return LLParserLimits(
            max_grammar_size=self.grammar,
            initial_lexer_fuel=self.compile_work,
            step_lexer_fuel=self.mask_work,
            step_max_items=self.mask_items,
            max_lexer_states=self.lexer_states,
            verbose_errors=False,
        )
