"""Hostile dumps: arbitrary headers and sections with a valid checksum."""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_PREFIX = struct.Struct("<8sII")
_HUGE = (2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64, 10**400)
_VALUES: tuple[object, ...] = (
    *_HUGE,
    *(-1, -(2**31), 0, 1, 2, 3, 7, 0.5, 1e308, float("nan"), float("inf"), True, False, None),
    *("", "0", "x" * 5000, "\0", "\ud800", [], {}, [[]], [1, 2, 3], {"sections": []}),
)


def hostile_dumps(dumps: Sequence[bytes], n: int, seed: int) -> Iterator[bytes]:
    """Mutated dumps with valid checksums.

    Args:
        dumps: valid dumps to mutate.
        n: number of dumps.
        seed: equal dumps for an equal seed.
    """
    rng = np.random.default_rng(seed)
    parts_of_dumps = [_unpack(dump) for dump in dumps]
    for i in range(n):
        header, sections = (
            json.loads(json.dumps(parts_of_dumps[i % len(parts_of_dumps)][0])),
            list(parts_of_dumps[i % len(parts_of_dumps)][1]),
        )
        for _ in range(1 + int(rng.integers(2))):
            (_change_header, _change_section, _resize_section, _add_edit)[rng.integers(4)](rng, header, sections)
        if rng.random() < 0.8:
            header["sections"] = [len(section) for section in sections]
        yield _pack(rng, header, sections)


def _unpack(dump: bytes) -> tuple[dict[str, Any], list[bytes]]:
    _, _, n_header = _PREFIX.unpack_from(dump)
    at = _PREFIX.size + n_header
    header = json.loads(dump[_PREFIX.size : at])
    sections = []
    for n in header["sections"]:
        sections.append(dump[at : at + n])
        at += n
    return header, sections


def _pack(rng: np.random.Generator, header: object, sections: Sequence[bytes]) -> bytes:
    text = json.dumps(header).encode()
    if rng.random() < 0.03:
        text = text[: rng.integers(len(text))] if rng.random() < 0.5 else b"[" * 100_000
    n_header = int(rng.choice([0, len(text) // 2, len(text) + 9, 2**32 - 1])) if rng.random() < 0.03 else len(text)
    version = int(rng.choice([0, 2, 2**32 - 1])) if rng.random() < 0.02 else 1
    body = b"".join((_PREFIX.pack(b"SLMSNAP\0", version, n_header), text, *sections))
    return body + hashlib.blake2b(body, digest_size=32).digest()


def _change_header(rng: np.random.Generator, header: dict[str, Any], sections: list[bytes]) -> None:
    """Put an unexpected value somewhere into the header."""
    entries = list(_entries(header))
    parent, key = entries[rng.integers(len(entries))]
    old = parent[key]
    if isinstance(old, int) and rng.random() < 0.6:
        parent[key] = old + int(rng.choice([-8, -4, -1, 1, 4, 8]))
    elif rng.random() < 0.15:
        del parent[key]
    else:
        # A copy: a later change may write into it, or put one list into itself.
        parent[key] = copy.deepcopy(_VALUES[rng.integers(len(_VALUES))])


def _entries(node: Any) -> Iterator[tuple[Any, Any]]:
    """All values inside, as pairs of parent and key."""
    keys = list(node) if isinstance(node, dict) else range(len(node))
    for key in keys:
        yield node, key
        if isinstance(node[key], dict | list):
            yield from _entries(node[key])


def _change_section(rng: np.random.Generator, header: dict[str, Any], sections: list[bytes]) -> None:
    """Overwrite a few numbers of a section."""
    i = int(rng.integers(len(sections)))
    data = bytearray(sections[i])
    for _ in range(1 + int(rng.integers(3)) if data else 0):
        at = 4 * int(rng.integers(max(1, len(data) // 4)))
        data[at : at + 4] = struct.pack("<I", int(rng.choice([0, 1, 300, 2**31 - 1, 2**31, 2**32 - 1])))[
            : len(data) - at
        ]
    sections[i] = bytes(data)


def _resize_section(rng: np.random.Generator, header: dict[str, Any], sections: list[bytes]) -> None:
    """Shorten, lengthen, empty or omit a section, or swap two."""
    i, j = (int(k) for k in rng.integers(len(sections), size=2))
    data, n = sections[i], int(rng.integers(1, 40))
    match int(rng.integers(6)):
        case 0:
            sections[i] = data[:-n]
        case 1:
            sections[i] = data + data[:n] if data else bytes(4 * n)
        case 2:
            sections[i] = b""
        case 3 if len(sections) > 1:
            del sections[i]
        case 4:
            sections[i], sections[j] = sections[j], sections[i]
        case _:
            sections[i] = data * 3


def _add_edit(rng: np.random.Generator, header: dict[str, Any], sections: list[bytes]) -> None:
    """Add a cut that never happened; its numbers fit the sequence, or almost."""
    meta = header["meta"] if isinstance(header.get("meta"), dict) else {}
    edits = meta.get("edits")
    if not isinstance(edits, list) or len(sections) != 3:
        return
    n, start = int(rng.integers(1, 5)), int(rng.integers(0, 12))
    length = start + n + int(rng.integers(-1, 5)) if rng.random() < 0.9 else int(rng.choice([2**31, 2**62, 10**9]))
    edits.append([start, n, length])
    if rng.random() < 0.9:
        bad = int(rng.choice([0, 1, 2**31 - 1, -1]))
        sections[1] += struct.pack(f"<{n}i", *([1] * (n - 1)), bad)
