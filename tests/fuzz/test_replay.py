"""A few seconds of fuzzing without coverage: the corpora, and inputs made of them by seeded changes."""

from __future__ import annotations

import random

import pytest

from fuzz.corpora import CORPORA
from fuzz.targets import TARGETS, run

N_CHANGED = {"load": 25, "tokenizer": 60, "dump": 40, "dump_parts": 60}
"""Inputs of each seed; 150 of targets that are not named."""
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


def changed(data: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, bytes that tell, pieces cut out, doubled and moved; most of them near the start."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        end = len(found) if rng.random() < 0.5 else min(len(found), 600)
        place, n = rng.randrange(end + 1), rng.choice([1, 2, 4, 8, 40])
        kind = rng.randrange(5)
        if kind == 0 and place < len(found):
            found[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            telling = rng.choice(_TELLING)
            found[place : place + len(telling)] = telling
        elif kind == 2:
            del found[place : place + n]
        elif kind == 3:
            found[place:place] = found[place : place + n]
        else:
            found[place:place] = rng.choice(_TELLING)
    return bytes(found)


def test_every_target_has_a_corpus() -> None:
    assert CORPORA.keys() == TARGETS.keys()


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_sound_is_read(target: str) -> None:
    for seed in CORPORA[target]():
        TARGETS[target](seed)


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_changed_is_read_or_refused(target: str) -> None:
    rng = random.Random(target)
    for seed in CORPORA[target]():
        for _ in range(N_CHANGED.get(target, 150)):
            data = changed(seed, rng)
            try:
                run(target, data)
            except BaseException as error:
                raise AssertionError(f"{target} of {data[:300]!r} ({len(data)} bytes)") from error
