"""The cost of ``multipleOf``: llguidance tracks remainders with an automaton, which has a state for each remainder.

If schemas are combined, the number of states is the least common multiple of their divisors. Building an automaton
cannot be interrupted, so divisors are bounded before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any

from slm_core.errors import ConstraintError

_COMBINES = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}
_INLINE = "%json"


def check_multiples(grammars: Sequence[Mapping[str, Any]], most: int) -> None:
    """Refuse grammars with too many remainders.

    Args:
        grammars: grammars of llguidance: a JSON schema, or Lark with inline schemas.
        most: the most remainders of all divisors together.

    Raises:
        ConstraintError: there are too many.
    """
    n_remainders = sum(map(_n_remainders, chain.from_iterable(map(_schemas, grammars))))
    if n_remainders > most:
        raise ConstraintError(f"multipleOf has {_shown(n_remainders)} remainders to follow (accepted: up to {most})")


def _schemas(grammar: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas in a grammar; invalid JSON is skipped, because llguidance reports it."""
    yield grammar.get("json_schema")
    decoder = json.JSONDecoder()
    for part in str(grammar.get("lark_grammar", "")).split(_INLINE)[1:]:
        try:
            yield decoder.raw_decode(part.lstrip())[0]
        except (ValueError, RecursionError):
            continue


def _n_remainders(schema: Any) -> int:
    divisors, combines = _divisors(schema)
    return math.lcm(*divisors) if combines and divisors else sum(divisors)


def _divisors(schema: Any) -> tuple[set[int], bool]:
    """All divisors in a schema, and whether it combines schemas."""
    divisors: set[int] = set()
    combines = False
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            combines = combines or not _COMBINES.isdisjoint(node)
            divisor = node.get("multipleOf")
            if isinstance(divisor, int | float) and not isinstance(divisor, bool):
                divisors.add(_as_integer(divisor))
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
    return divisors, combines


def _as_integer(divisor: float) -> int:
    """A divisor without its decimal point, at least 1: remainders are computed on digits."""
    if isinstance(divisor, int):
        return max(1, abs(divisor))
    if not math.isfinite(divisor):
        raise ConstraintError(f"multipleOf is {divisor} (accepted: a finite number)")
    digits = Decimal(repr(divisor)).normalize()
    return max(1, abs(int(digits.scaleb(max(0, -int(digits.as_tuple().exponent))))))


def _shown(number: int) -> str:
    return str(number) if number < 10**18 else "more than 10**18"
