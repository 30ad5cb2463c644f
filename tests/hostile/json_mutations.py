"""JSON values with one or two changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

Rng: TypeAlias = np.random.Generator

VALUES: tuple[Any, ...] = (
    *(
        0,
        1,
        -1,
        2,
        3,
        7,
        17,
        2**15,
        2**31 - 1,
        2**31,
        2**32,
        2**53 + 1,
        2**62,
        2**63,
        2**64,
        10**39,
        10**400,
        -(10**39),
    ),
    *(0.5, -0.0, 1e-320, 1e30, 1e39, 1e308, float("nan"), float("inf"), -float("inf"), True, False, None),
    *("", "0", "x" * 3000, "\0", "\ud800", "\n\n", "bogus", "{{", "(", "[a-", "Ġ", "[UNK]", "</s>"),
    *([], {}, [[]], [0, 1, 2], [None], ["a", "b"], {"type": "bogus"}, {"": {}}),
)


def mutated(rng: Rng, value: Any, more: Sequence[Any] = ()) -> Any:
    """A copy with one or two changes; ``more`` are values to insert in addition to ``VALUES``."""
    changed = {"": _copied(value)}
    for _ in range(1 + int(rng.integers(2))):
        _change(rng, changed, more)
    return changed.get("")


def _change(rng: Rng, root: dict[str, Any], more: Sequence[Any]) -> None:
    places = list(_places(root))
    small = [place for place in places if len(place[0]) < 100]  # otherwise most changes would be in the vocabulary
    chosen = small if small and rng.random() < 0.7 else places
    parent, key = chosen[rng.integers(len(chosen))]
    old = parent[key]
    match int(rng.integers(7)):
        case 0 if root != parent:
            del parent[key]
        case 1 if type(old) is int:
            parent[key] = old + int(rng.choice([-2, -1, 1, 2, 8]))
        case 2:
            other, name = places[rng.integers(len(places))]
            parent[key] = _copied(other[name])
        case 3 if isinstance(old, list):
            parent[key] = old[: rng.integers(len(old) + 1)] if rng.random() < 0.5 else old + old
        case 4 if isinstance(parent, dict):
            del parent[key]
            parent[str(_any(rng, more))[:50]] = old
        case 5:
            depth = int(rng.choice([1, 2, 70, 400]))
            for _ in range(depth):
                old = [old] if rng.random() < 0.5 else {"items": old}
            parent[key] = old
        case _:
            parent[key] = _copied(_any(rng, more))


def _any(rng: Rng, more: Sequence[Any]) -> Any:
    pool = more if len(more) and rng.random() < 0.5 else VALUES
    return pool[rng.integers(len(pool))]


def _copied(value: Any) -> Any:
    """A deep copy; no value may be nested deeper than Python's recursion limit."""
    return json.loads(json.dumps(value))


def _places(root: Any) -> Iterator[tuple[Any, Any]]:
    """Every inner value, as its parent and its key."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            yield node, key
            if isinstance(node[key], dict | list):
                waiting.append(node[key])
