r"""The checked container of dumps.

Layout, little-endian::

    8 bytes   magic "SLMSNAP\0"
    uint32    format version
    uint32    length of the header
    header    JSON: {"kind": str, "meta": {...}, "sections": [length, ...]}
    sections  one after another
    32 bytes  BLAKE2b-256 of everything before

The checksum detects damage, not malicious changes: readers of ``meta`` and sections check every value. Containers never
contain pickle.
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
from slm_core.interrupts import uninterrupted

FORMAT_VERSION = 1
LARGEST_NUMBER = np.float32(1e12)  # not a Python float, which NumPy would convert to an infinite float16
"""The largest magnitude in keys, values, states and embedding rows: no model computes larger numbers.

The L1 norm of a row of a weight matrix is at most 1e5, and 2**14 squares of 1e12 * 1e5 add up to 1.6e38, just below the
float32 maximum. Products of keys and queries are far smaller.
"""
PART_BYTES = 8 << 20
"""The largest number of bytes in one part of a container."""
_MAGIC = b"SLMSNAP\0"
_PREFIX = struct.Struct("<8sII")
_DIGEST_SIZE = 32


class Pieces(NamedTuple):
    """A section whose bytes are made lazily, piece by piece.

    Attributes:
        n_bytes: the size of all pieces, in bytes.
        pieces: the bytes, in pieces of any size.
    """

    n_bytes: int
    pieces: Iterator[bytes | memoryview]


def pack(kind: str, meta: Mapping[str, object], sections: Sequence[bytes | Pieces]) -> bytes:
    """Pack ``sections`` and their description into a container.

    Args:
        kind: the kind of the content; ``unpack`` expects the same kind.
        meta: JSON values that describe the sections.
        sections: raw bytes, or pieces of them.
    """
    return b"".join(pack_parts(kind, meta, sections))


def pack_parts(
    kind: str, meta: Mapping[str, object], sections: Sequence[bytes | Pieces], part_bytes: int = PART_BYTES
) -> Iterator[bytes]:
    """The bytes of ``pack`` in parts of ``part_bytes``; the last part is shorter.

    Args:
        kind: the kind of the content.
        meta: JSON values that describe the sections.
        sections: raw bytes, or pieces of them; a piece is made when its part is requested.
        part_bytes: the size of a part, in bytes.
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
    """Append a piece to a part; yields each full part and empties it."""
    remaining = memoryview(piece)
    while len(part) + len(remaining) >= part_bytes:
        n = part_bytes - len(part)
        full = b"".join((part, remaining[:n])) if part else bytes(remaining[:n])
        part.clear()
        yield full
        remaining = remaining[n:]
    part += remaining


def unpack(kind: str, data: bytes) -> tuple[Mapping[str, object], list[bytes]]:
    """Unpack a container; returns ``meta`` and the sections.

    Raises:
        InvalidSnapshot: the bytes are damaged, truncated or not a container.
        SnapshotMismatch: the container is of another kind or version.
    """
    incoming = Incoming(kind, (data,))
    with incoming.refusals():
        sections = [b"".join(incoming.section(i)) for i in range(len(incoming.lengths))]
        incoming.finish()
    return incoming.meta, sections


class Incoming:
    """Reads a container in parts: the header first, then one section after another, then the checksum.

    The data is verified only after ``finish`` has returned.

    Args:
        kind: the expected kind.
        parts: its bytes, in parts of any size.

    Raises:
        InvalidSnapshot: the bytes are damaged, truncated or not a container.
        SnapshotMismatch: the container is of another kind or version.

    Attributes:
        meta: JSON values that describe the sections.
        lengths: the size of each section, in bytes.
    """

    def __init__(self, kind: str, parts: Iterable[bytes]) -> None:
        self._parts = iter(parts)
        self._digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
        self._held_back = b""  # the last bytes so far, which may be the checksum
        self._arrived: list[memoryview] = []  # parts that are not read yet
        self._is_over = False  # whether no checksum can be compared
        with self.refusals():
            self.meta, self.lengths = self._read_header(kind)

    def section(self, i: int) -> Iterator[memoryview]:
        """The bytes of section ``i``, which must be the next one, in pieces as they arrive.

        Raises:
            InvalidSnapshot: the container ends inside the section.
        """
        n_missing = self.lengths[i]
        while n_missing:
            piece = self._next(n_missing)
            if not piece:
                raise InvalidSnapshot("the dump's sections do not add up to its size")
            n_missing -= len(piece)
            yield piece

    def finish(self) -> None:
        """Verify the checksum, after all sections have been read.

        Raises:
            InvalidSnapshot: the checksum does not match, or there are more bytes.
        """
        has_more = bool(self._next(1))
        self._check_digest()
        if has_more:
            raise InvalidSnapshot("the dump's sections do not add up to its size")

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """If the body refuses the content, read the container to its end, and report damage first."""
        try:
            yield
        except SlmError:
            for _ in self.refused():
                pass
            raise

    def refused(self) -> Iterator[None]:
        """Read the container to its end after its content was refused, one piece a step: damage is the error to report.

        Raises:
            InvalidSnapshot: the checksum does not match.
        """
        while not self._is_over and self._next(PART_BYTES):
            yield
        if not self._is_over:
            self._check_digest()

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
        """The next ``n`` bytes, or all remaining bytes."""
        pieces = []
        while n and (piece := self._next(n)):
            pieces.append(bytes(piece))
            n -= len(piece)
        return b"".join(pieces)

    def _next(self, n: int) -> memoryview:
        """Some of the next bytes, at most ``n``; empty at the end."""
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
            with uninterrupted.paused():  # a pipe may give no part for a long time
                part = next(self._parts, None)
            if part is not None and not isinstance(part, bytes | bytearray | memoryview):
                raise InvalidSnapshot(f"a part of the dump is {type(part).__name__} (accepted: bytes)")
            return None if part is None else memoryview(part).cast("B")
        except BaseException:
            self._is_over = True
            raise

    def _take_in(self, part: memoryview) -> None:
        """Queue the bytes of a part, except the last bytes so far, which may be the checksum."""
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
    """Refuse numbers in a dump that no model computes.

    Args:
        numbers: dequantized numbers of any shape.
        what: the name of the numbers, for the message.

    Raises:
        InvalidSnapshot: a number is NaN, or its magnitude is above ``LARGEST_NUMBER``.
    """
    if not (np.abs(numbers) <= LARGEST_NUMBER).all():
        raise InvalidSnapshot(f"{what} holds a number that no model computes (accepted: magnitudes up to 1e12)")
