r"""The checked container of dumps.

Layout, little-endian::

    8 bytes   magic "SLMSNAP\0"
    uint32    format version
    uint32    length of the header
    header    JSON: {"kind": str, "meta": {...}, "sections": [length, ...]}
    sections  one after another
    32 bytes  BLAKE2b-256 of everything before

The checksum finds damage, not malice: whoever reads ``meta`` and sections checks every value. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidSnapshot, SnapshotMismatch

FORMAT_VERSION = 1
LARGEST_NUMBER = np.float32(1e12)  # no Python float, which NumPy would round to an infinite float16
"""Larger numbers in keys, values, states and embedding rows are refused: no model computes them, and they overflow.

A row of a weight matrix adds up to at most 1e5 in magnitude (L1), and 2**14 squares of 1e12 * 1e5 make 1.6e38, which
float32 just holds. A product of keys and queries stays far below that.
"""
_MAGIC = b"SLMSNAP\0"
_PREFIX = struct.Struct("<8sII")
_DIGEST_SIZE = 32


def pack(kind: str, meta: Mapping[str, object], sections: Sequence[bytes]) -> bytes:
    """Put ``sections`` and what describes them into a container.

    Args:
        kind: what the container holds; ``unpack`` asks for the same.
        meta: JSON values that describe the sections.
        sections: raw bytes.
    """
    header = json.dumps({"kind": kind, "meta": meta, "sections": [len(s) for s in sections]}).encode()
    body = b"".join((_PREFIX.pack(_MAGIC, FORMAT_VERSION, len(header)), header, *sections))
    return body + _digest(body)


def unpack(kind: str, data: bytes) -> tuple[Mapping[str, object], list[bytes]]:
    """Take a container apart; returns ``meta`` and the sections.

    Raises:
        InvalidSnapshot: damaged, truncated or no container at all.
        SnapshotMismatch: a container of another kind or version.
    """
    header, start = _read_header(bytes(data))
    if header["kind"] != kind:
        raise SnapshotMismatch(f"this is a dump of a {header['kind']!r}, not of a {kind!r}")
    meta, lengths = header["meta"], header["sections"]
    if not isinstance(meta, dict) or not isinstance(lengths, list) or not all(is_count(n) for n in lengths):
        raise InvalidSnapshot("the dump's header is malformed")
    if start + sum(lengths) + _DIGEST_SIZE != len(data):
        raise InvalidSnapshot("the dump's sections do not add up to its size")
    sections = []
    for length in lengths:
        sections.append(bytes(data[start : start + length]))
        start += length
    return meta, sections


def is_count(value: object) -> bool:
    """Whether a JSON value is an integer from 0 on (``True`` is not)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_numbers(numbers: NDArray[np.floating[Any]], what: str) -> None:
    """Refuse numbers out of a dump that no model computes.

    Args:
        numbers: of any shape, as they are used: after dequantization.
        what: they are, for the message.

    Raises:
        InvalidSnapshot: one is not a number, or is beyond ``LARGEST_NUMBER``.
    """
    if not (np.abs(numbers) <= LARGEST_NUMBER).all():
        raise InvalidSnapshot(f"{what} holds a number that no model computes (accepted: magnitudes up to 1e12)")


def _read_header(data: bytes) -> tuple[dict[str, object], int]:
    if len(data) < _PREFIX.size + _DIGEST_SIZE or not data.startswith(_MAGIC):
        raise InvalidSnapshot(f"not a dump: {len(data)} bytes without the mark of one")
    if data[-_DIGEST_SIZE:] != _digest(data[:-_DIGEST_SIZE]):
        raise InvalidSnapshot("the dump is damaged: its checksum does not match")
    _, version, header_length = _PREFIX.unpack_from(data)
    if version != FORMAT_VERSION:
        raise SnapshotMismatch(f"the dump has format version {version} (accepted: {FORMAT_VERSION})")
    end = _PREFIX.size + header_length
    try:
        header = json.loads(data[_PREFIX.size : end])
    except (ValueError, RecursionError) as error:
        raise InvalidSnapshot("the dump's header is not JSON") from error
    if not isinstance(header, dict) or set(header) != {"kind", "meta", "sections"}:
        raise InvalidSnapshot("the dump's header is malformed")
    return header, end


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_SIZE).digest()
