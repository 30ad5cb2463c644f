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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidSnapshot, SlmError, SnapshotMismatch

FORMAT_VERSION = 1
LARGEST_NUMBER = np.float32(1e12)  # no Python float, which NumPy would round to an infinite float16
"""Larger numbers in keys, values, states and embedding rows are refused: no model computes them, and they overflow.

A row of a weight matrix adds up to at most 1e5 in magnitude (L1), and 2**14 squares of 1e12 * 1e5 make 1.6e38, which
float32 just holds. A product of keys and queries stays far below that.
"""
PART_BYTES = 8 << 20
"""The most bytes of one part, where a container is handed out in parts."""
_MAGIC = b"SLMSNAP\0"
_PREFIX = struct.Struct("<8sII")
_DIGEST_SIZE = 32


class Pieces(NamedTuple):
    """A section whose bytes are made piece by piece, when they are asked for.

    Attributes:
        n_bytes: of all pieces.
        pieces: the bytes, in pieces of any size.
    """

    n_bytes: int
    pieces: Iterator[bytes | memoryview]


def pack(kind: str, meta: Mapping[str, object], sections: Sequence[bytes | Pieces]) -> bytes:
    """Put ``sections`` and what describes them into a container.

    Args:
        kind: what the container holds; ``unpack`` asks for the same.
        meta: JSON values that describe the sections.
        sections: raw bytes, or pieces of them.
    """
    return b"".join(pack_parts(kind, meta, sections))


def pack_parts(
    kind: str, meta: Mapping[str, object], sections: Sequence[bytes | Pieces], part_bytes: int = PART_BYTES
) -> Iterator[bytes]:
    """The container that ``pack`` makes, in parts of ``part_bytes``; the last is shorter.

    Args:
        kind: what the container holds.
        meta: JSON values that describe the sections.
        sections: raw bytes, or pieces of them; a piece is asked for when the part that it belongs to is.
        part_bytes: bytes of a part.
    """
    lengths = [section.n_bytes if isinstance(section, Pieces) else len(section) for section in sections]
    header = json.dumps({"kind": kind, "meta": meta, "sections": lengths}).encode()
    digest, part = hashlib.blake2b(digest_size=_DIGEST_SIZE), bytearray()
    for piece in _pieces(_PREFIX.pack(_MAGIC, FORMAT_VERSION, len(header)) + header, sections):
        digest.update(piece)
        yield from _filled(part, piece, part_bytes)
    yield from _filled(part, digest.digest(), part_bytes)
    if part:
        yield bytes(part)


def _pieces(header: bytes, sections: Sequence[bytes | Pieces]) -> Iterator[bytes | memoryview]:
    yield header
    for section in sections:
        if isinstance(section, Pieces):
            yield from section.pieces
        else:
            yield section


def _filled(part: bytearray, piece: bytes | memoryview, part_bytes: int) -> Iterator[bytes]:
    """Append a piece to a part; parts that are full are given and taken out."""
    rest = memoryview(piece)
    while len(part) + len(rest) >= part_bytes:
        n = part_bytes - len(part)
        full = b"".join((part, rest[:n])) if part else bytes(rest[:n])
        part.clear()
        yield full
        rest = rest[n:]
    part += rest


def unpack(kind: str, data: bytes) -> tuple[Mapping[str, object], list[bytes]]:
    """Take a container apart; returns ``meta`` and the sections.

    Raises:
        InvalidSnapshot: damaged, truncated or no container at all.
        SnapshotMismatch: a container of another kind or version.
    """
    incoming = Incoming(kind, (data,))
    with incoming.refusals():
        sections = [b"".join(incoming.section(i)) for i in range(len(incoming.lengths))]
        incoming.finish()
    return incoming.meta, sections


class Incoming:
    """A container that comes in parts: the header first, then one section after another, then the checksum.

    What was read is known to be undamaged when ``finish`` has returned, not before.

    Args:
        kind: what the container must hold.
        parts: its bytes, in parts of any size.

    Raises:
        InvalidSnapshot: damaged, truncated or no container at all.
        SnapshotMismatch: a container of another kind or version.

    Attributes:
        meta: JSON values that describe the sections.
        lengths: bytes of each section.
    """

    def __init__(self, kind: str, parts: Iterable[bytes]) -> None:
        self._parts = iter(parts)
        self._digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
        self._held_back = b""  # the last bytes so far, which may be the checksum
        self._arrived: list[memoryview] = []  # and not read yet
        self._is_over = False  # whether no checksum can be compared
        with self.refusals():
            self.meta, self.lengths = self._read_header(kind)

    def section(self, i: int) -> Iterator[memoryview]:
        """The bytes of section ``i``, which comes next, in pieces as they arrive.

        Raises:
            InvalidSnapshot: the container ends before the section does.
        """
        missing = self.lengths[i]
        while missing:
            piece = self._next(missing)
            if not piece:
                raise InvalidSnapshot("the dump's sections do not add up to its size")
            missing -= len(piece)
            yield piece

    def finish(self) -> None:
        """All sections have been read: compare the checksum.

        Raises:
            InvalidSnapshot: the checksum does not match, or there are more bytes.
        """
        has_more = bool(self._next(1))
        self._check_digest()
        if has_more:
            raise InvalidSnapshot("the dump's sections do not add up to its size")

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """A container that is refused inside is read to its end: if it is damaged, that is what is wrong with it."""
        try:
            yield
        except SlmError:
            if not self._is_over:
                self._check_digest()
            raise

    def _check_digest(self) -> None:
        while self._next(PART_BYTES):
            pass
        if self._held_back != self._digest.digest():
            raise InvalidSnapshot("the dump is damaged: its checksum does not match")

    def _read_header(self, kind: str) -> tuple[Mapping[str, object], Sequence[int]]:
        prefix = self._exactly(_PREFIX.size)
        if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
            self._is_over = True
            raise InvalidSnapshot("not a dump: its first bytes are not the mark of one")
        _, version, n_header = _PREFIX.unpack(prefix)
        if version != FORMAT_VERSION:
            raise SnapshotMismatch(f"the dump has format version {version} (accepted: {FORMAT_VERSION})")
        try:
            header = json.loads(self._exactly(n_header))
        except (ValueError, RecursionError) as error:
            raise InvalidSnapshot("the dump's header is not JSON") from error
        if not isinstance(header, dict) or set(header) != {"kind", "meta", "sections"}:
            raise InvalidSnapshot("the dump's header is malformed")
        if header["kind"] != kind:
            raise SnapshotMismatch(f"this is a dump of a {header['kind']!r}, not of a {kind!r}")
        meta, lengths = header["meta"], header["sections"]
        if not isinstance(meta, dict) or not isinstance(lengths, list) or not all(is_count(n) for n in lengths):
            raise InvalidSnapshot("the dump's header is malformed")
        return meta, lengths

    def _exactly(self, n: int) -> bytes:
        """The next ``n`` bytes, or all that are left."""
        pieces = []
        while n and (piece := self._next(n)):
            pieces.append(bytes(piece))
            n -= len(piece)
        return b"".join(pieces)

    def _next(self, n: int) -> memoryview:
        """Some of the next bytes, at most ``n``; none at the end."""
        while not self._arrived:
            part = self._pull()
            if part is None:
                return memoryview(b"")
            self._take_in(part)
        piece = self._arrived[0][:n]
        self._arrived[0] = self._arrived[0][n:]
        if not self._arrived[0]:
            del self._arrived[0]
        return piece

    def _pull(self) -> memoryview | None:
        try:
            part = next(self._parts, None)
            if part is not None and not isinstance(part, bytes | bytearray | memoryview):
                raise InvalidSnapshot(f"a part of the dump is {type(part).__name__} (accepted: bytes)")
            return None if part is None else memoryview(part).cast("B")
        except BaseException:
            self._is_over = True
            raise

    def _take_in(self, part: memoryview) -> None:
        """Hold the last bytes back, which may be the checksum, and let the others be read."""
        if len(part) < _DIGEST_SIZE:
            part, before = memoryview(self._held_back + part), b""
        else:
            before = self._held_back
        split = max(0, len(part) - _DIGEST_SIZE)
        self._held_back = bytes(part[split:])
        for piece in (memoryview(before), part[:split]):
            if piece:
                self._digest.update(piece)
                self._arrived.append(piece)


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
