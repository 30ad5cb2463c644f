"""Damaged dumps with right checksums."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slm_conformance.suite.hostile import hostile_dumps
from slm_core.context.snapshot import SequenceSnapshot

_FLOATS = (3.4e38, -3.4e38, 1e38, 1e30, 1e25, -1e20, 1e19, 1e18, 1e15, 1e12, 1e-45, float("nan"), float("inf"))
_HALVES = (
    0x7BFF,
    0xFBFF,
    0x7C00,
    0x7E00,
    0x7F7F,
    0xFF7F,
    0x7F80,
    0x0001,
    0x7800,
)  # extreme values of float16 and bfloat16


def mutated(seed: int, sound: Sequence[bytes]) -> bytes:
    """A damaged dump, which depends only on the seed."""
    rng = np.random.default_rng([seed, 1])
    start = int(rng.integers(len(sound)))
    if rng.random() < 0.4:
        return next(hostile_dumps([*sound[start:], *sound[:start]], 1, seed))
    snapshot = SequenceSnapshot.from_bytes(sound[start])
    if len(snapshot.rows) and rng.random() < 0.6:
        payload = snapshot.payload if rng.random() < 0.5 else b""  # without a payload, the rows are decoded again
        return replace(snapshot, rows=_damaged_rows(rng, snapshot), payload=payload).to_bytes()
    return replace(snapshot, payload=_damaged_payload(rng, snapshot.payload)).to_bytes()


def _damaged_rows(rng: np.random.Generator, snapshot: SequenceSnapshot) -> np.ndarray:
    rows = snapshot.rows.copy()
    value = np.float32(_FLOATS[rng.integers(len(_FLOATS))])
    match int(rng.integers(3)):
        case 0:
            rows[rng.integers(len(rows)), rng.integers(rows.shape[1])] = value
        case 1:
            rows[rng.integers(len(rows))] = value
        case _:
            rows *= value
    return rows


def _damaged_payload(rng: np.random.Generator, payload: bytes) -> bytes:
    """A payload with numbers that no model computes: one, a run of them, or many single ones."""
    raw = bytearray(payload)
    if rng.random() < 0.6:
        word = struct.pack("<f", _FLOATS[rng.integers(len(_FLOATS))])
    else:
        word = struct.pack("<H", _HALVES[rng.integers(len(_HALVES))])
    size, n = len(word), max(1, len(raw) // len(word))
    run = int(rng.choice([1, 2, 32, 1024]))
    step = int(rng.choice([1, 1, 16, 17, 34 // size]))
    first = int(rng.integers(n))
    offset = int(rng.integers(4)) if rng.random() < 0.3 else 0
    for i in range(first, min(n, first + run * step), step):
        raw[i * size + offset : (i + 1) * size + offset] = word
    return bytes(raw[: len(payload)])
