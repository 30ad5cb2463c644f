"""A few seconds of fuzzing without coverage: the corpora, and seeded mutations of them."""

from __future__ import annotations

import random

import pytest

from fuzz.corpora import CORPORA
from fuzz.targets import TARGETS, run

N_CHANGED = {"load": 25, "tokenizer": 60, "dump": 40, "dump_parts": 60}
"""The number of mutated inputs per target; 150 for targets that are not listed."""
_TELLING = (
    b"\x00",
    b"\xff",
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x80",
    b"-1",
    b"1e999",
    b"null",
    b"[",
    b'"',
    b"{}",
    b"9" * 20,
)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The data after one to four changes, mostly near the start: flipped bits, special bytes, and removed, duplicated
    and moved pieces."""
    buffer = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        end = len(buffer) if rng.random() < 0.5 else min(len(buffer), 600)
        place, n = rng.randrange(end + 1), rng.choice([1, 2, 4, 8, 40])
        kind = rng.randrange(5)
        if kind == 0 and place < len(buffer):
            buffer[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            telling = rng.choice(_TELLING)
            buffer[place : place + len(telling)] = telling
        elif kind == 2:
            del buffer[place : place + n]
        elif kind == 3:
            buffer[place:place] = buffer[place : place + n]
        else:
            buffer[place:place] = rng.choice(_TELLING)
    return bytes(buffer)


def test_every_target_has_a_corpus() -> None:
    assert CORPORA.keys() == TARGETS.keys()


@pytest.mark.parametrize("target", TARGETS)
def test_valid_inputs_are_read(target: str) -> None:
    for seed in CORPORA[target]():
        TARGETS[target](seed)


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_inputs_are_read_or_refused(target: str) -> None:
    rng = random.Random(target)
    for seed in CORPORA[target]():
        for _ in range(N_CHANGED.get(target, 150)):
            data = mutated(seed, rng)
            try:
                run(target, data)
            except BaseException as error:
                raise AssertionError(f"{target} of {data[:300]!r} ({len(data)} bytes)") from error
