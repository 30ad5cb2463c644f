r"""Dumps: a checked container, and the state of one sequence inside it.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidSnapshot, SnapshotMismatch
from slm_core.inputs import MAX_OFFSET, NO_AHEAD, NO_OFFSETS, NO_ROWS, ahead_of, held_inputs, offset_of, row_of, rows_of
from slm_core.types import EMBEDDED

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


@dataclass(frozen=True, slots=True)
class Edit:
    """One ``cut`` in the history of a sequence.

    Attributes:
        start: first position that was cut.
        removed: the tokens that were cut, ``HeldInput`` for embedding rows and in spans.
        length_before: tokens the sequence held when it was cut, those removed included.
    """

    start: int
    removed: tuple[int, ...]
    length_before: int

    @property
    def end(self) -> int:
        """The position after the last that was cut."""
        return self.start + len(self.removed)


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """The whole state of one sequence.

    Attributes:
        backend: who made it.
        payload_format: how ``payload`` is laid out: whoever has the same format can use it as it is.
        fingerprint: the model's.
        tokens: the tokens held, int32 [S], ``EMBEDDED`` for each embedding row; positions are 0 to S-1.
        edits: the cuts that led here, oldest first: tokens and edits suffice to rebuild the KV cache.
        payload: the KV cache in the backend's own layout, or b"".
        rows: those of ``tokens`` that are ``EMBEDDED``, float32 [n, E]; edits have their own.
        ahead: how many tokens behind each were in its span, int32 [S], or [0] for no spans; likewise.
        offsets: where each of ``rows`` stands, int32 [n, 3], or [0, 3] where all do as tokens would; likewise.
    """

    backend: str
    payload_format: str
    fingerprint: str
    tokens: NDArray[np.int32]
    edits: tuple[Edit, ...]
    payload: bytes
    rows: NDArray[np.float32] = field(default_factory=lambda: NO_ROWS)
    ahead: NDArray[np.int32] = field(default_factory=lambda: NO_AHEAD)
    offsets: NDArray[np.int32] = field(default_factory=lambda: NO_OFFSETS)

    def held(self) -> list[int]:
        """What the sequence holds: ids, and ``HeldInput`` for embedding rows and in spans."""
        return held_inputs(self.tokens, self.rows, self.ahead, self.offsets)

    def to_bytes(self) -> bytes:
        """The container, kind "sequence"; sections of rows, spans and offsets come last, as many as it takes."""
        meta = {
            "backend": self.backend,
            "payload_format": self.payload_format,
            "fingerprint": self.fingerprint,
            "edits": [[e.start, len(e.removed), e.length_before] for e in self.edits],
        }
        removed = [token for e in self.edits for token in e.removed]
        ids = self.tokens.astype("<i4").tobytes(), np.array(removed, "<i4").tobytes()
        more = [
            b"".join(part.astype("<f4").tobytes() for part in (self.rows, rows_of(removed))),
            _integers(self.ahead if len(self.ahead) else [0] * len(self.tokens), map(ahead_of, removed)),
            _integers(
                self.offsets if len(self.offsets) else [(0, 0, 0)] * len(self.rows),
                (offset_of(token) for token in removed if row_of(token) is not None),
            ),
        ]
        while more and not more[-1]:
            more.pop()
        return pack("sequence", meta, (*ids, self.payload, *more))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a container; every value is checked.

        Raises:
            InvalidSnapshot, SnapshotMismatch: see ``unpack``.
        """
        meta, sections = unpack("sequence", data)
        names = ("backend", "payload_format", "fingerprint")
        known = set(meta) == {*names, "edits"} and all(isinstance(meta[n], str) for n in names)
        if not known or len(sections) not in (3, 4, 5, 6):
            raise InvalidSnapshot("the dump of a sequence lacks a part")
        tokens, removed = _tokens(sections[0]), _tokens(sections[1])
        n_own, n_removed = (int(np.count_nonzero(ids == EMBEDDED)) for ids in (tokens, removed))
        rows = _rows(sections[3] if len(sections) > 3 else b"", n_own + n_removed)
        ahead = _ahead(sections[4] if len(sections) > 4 else b"", len(tokens) + len(removed))
        own, of_removed = ahead[: len(tokens)], ahead[len(tokens) :]
        offsets = _offsets(sections[5] if len(sections) > 5 else b"", n_own + n_removed)
        gone = held_inputs(removed, rows[n_own:], of_removed, offsets[n_own:])
        edits = _read_edits(meta["edits"], gone, len(tokens))
        backend, payload_format, fingerprint = (str(meta[n]) for n in names)
        more = rows[:n_own], own, offsets[:n_own]
        return cls(backend, payload_format, fingerprint, tokens, edits, sections[2], *more)


def _integers(own: NDArray[np.int32] | Sequence[object], removed: Iterable[object]) -> bytes:
    """Numbers of what is held and of what was cut, or b"" where all are 0."""
    found = np.array([*own, *removed], "<i4")
    return found.tobytes() if found.any() else b""


def _tokens(section: bytes) -> NDArray[np.int32]:
    if len(section) % 4:
        raise InvalidSnapshot("the dump's tokens are not whole")
    return np.frombuffer(section, "<i4").astype(np.int32)


def _rows(section: bytes, n: int) -> NDArray[np.float32]:
    """The embedding rows of a dump, [n, E], where ``n`` ids stand for one."""
    width, rest = divmod(len(section), 4 * max(1, n))
    if rest or (n > 0) != (width > 0):
        raise InvalidSnapshot(f"the dump has {len(section)} bytes of embedding rows, and {n} ids that stand for one")
    if n == 0:
        return NO_ROWS
    rows = np.frombuffer(section, "<f4").reshape(n, width).astype(np.float32)
    check_numbers(rows, "an embedding row of the dump")
    return rows


def _offsets(section: bytes, n: int) -> NDArray[np.int32]:
    """Where each of ``n`` rows of a dump stands, [n, 3]; [0, 3] where all do as tokens would."""
    if len(section) not in (0, 12 * n):
        raise InvalidSnapshot(f"the dump has {len(section)} bytes of offsets for {n} rows")
    offsets = np.frombuffer(section, "<i4").astype(np.int32).reshape(-1, 3)
    if ((offsets < -2 * MAX_OFFSET) | (offsets > MAX_OFFSET)).any():
        raise InvalidSnapshot("the dump has offsets of rows that are out of range")
    return offsets


def _ahead(section: bytes, n: int) -> NDArray[np.int32]:
    """Of each of ``n`` inputs of a dump, how many behind it were in its span; [0] for no spans."""
    if len(section) not in (0, 4 * n):
        raise InvalidSnapshot(f"the dump has {len(section)} bytes of spans for {n} inputs")
    ahead = np.frombuffer(section, "<i4").astype(np.int32)
    if (ahead < 0).any():
        raise InvalidSnapshot("the dump has a span of fewer than no tokens")
    return ahead


def _read_edits(rows: object, removed: Sequence[int], n_tokens: int) -> tuple[Edit, ...]:
    """The edits, checked to be a history that can have led to ``n_tokens`` tokens."""
    if not isinstance(rows, list):
        raise InvalidSnapshot("the dump's edit history is malformed")
    edits: list[Edit] = []
    taken = length = 0
    for row in rows:
        if not isinstance(row, list) or len(row) != 3 or not all(is_count(n) for n in row):
            raise InvalidSnapshot("the dump's edit history is malformed")
        start, n_removed, length_before = row
        if n_removed == 0 or start + n_removed > length_before or length_before < length:
            raise InvalidSnapshot("the dump's edit history contradicts itself")
        edits.append(Edit(start, tuple(removed[taken : taken + n_removed]), length_before))
        taken, length = taken + n_removed, length_before - n_removed
    if taken != len(removed) or length > n_tokens:
        raise InvalidSnapshot("the dump's edit history contradicts its tokens")
    return tuple(edits)
