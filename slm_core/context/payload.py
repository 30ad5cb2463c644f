"""KV payloads on their way: out of an engine part by part, and into one piece by piece."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from slm_core.container import Pieces
from slm_core.context.snapshot import PayloadHeader
from slm_core.errors import InvalidSnapshot, SequenceChanged

PIECE_BYTES = 1 << 20
"""Bytes that an engine reads or writes at a time, or one unit; bounds what a dump takes besides the dump itself."""


class PayloadWriter(abc.ABC):
    """Takes in a payload piece by piece, on storage that no sequence holds yet.

    Nothing has changed before ``put``: a writer that is not used any more is forgotten.
    """

    @abc.abstractmethod
    def write(self, piece: memoryview) -> None:
        """Take in the bytes that come next; they are valid until the call returns.

        Raises:
            InvalidSnapshot: too many bytes, or numbers that no model computes.
        """

    @abc.abstractmethod
    def put(self) -> None:
        """The payload is whole: the sequence holds it from now on, in place of what it held.

        Raises:
            InvalidSnapshot: bytes are missing; nothing has changed.
        """

    @abc.abstractmethod
    def undo(self) -> None:
        """``put`` was called, perhaps in vain: the sequence holds what it held before."""


class DumpParts:
    """The parts of a dump, each made when it is asked for.

    Args:
        parts: makes them.
        call: what each is made in; it raises where none can be made any more.
    """

    def __init__(self, parts: Iterator[bytes], call: Callable[[], AbstractContextManager[None]]) -> None:
        self._parts = parts
        self._call = call
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            with self._call():
                return self._made()
        except SequenceChanged:
            self.forget()
            raise

    def _made(self) -> bytes:
        if self._error is not None:
            raise self._error
        try:
            return next(self._parts)
        except StopIteration:
            raise
        except BaseException as error:  # the parts that are left would not be those of a whole dump
            self._error = error
            raise

    def forget(self) -> None:
        """Let go of what the parts that are left would be made of."""
        self._parts = iter(())


class Section(NamedTuple):
    """Bytes of a payload that lie side by side, and whose units go to one place.

    Attributes:
        n_units: tokens of one array of keys or values; or 1, of a state.
        unit_bytes: bytes of each.
        write: takes whole units, from the unit of a number on; raises ``InvalidSnapshot`` for numbers that no model
            computes.
    """

    n_units: int
    unit_bytes: int
    write: Callable[[int, bytes], None]


class SectionWriter:
    """Hands the bytes of a payload, as they come, to its sections.

    Args:
        sections: all of them, in order.
    """

    def __init__(self, sections: Iterable[Section]) -> None:
        self._sections = deque(section for section in sections if section.n_units * section.unit_bytes)
        self.n_bytes = sum(section.n_units * section.unit_bytes for section in self._sections)
        self._n_written = 0  # units of the first section
        self._pending = bytearray()

    def write(self, piece: memoryview) -> None:
        """Take in the bytes that come next.

        Raises:
            InvalidSnapshot: too many bytes, or numbers that no model computes.
        """
        for first in range(0, len(piece), PIECE_BYTES):
            self._pending += piece[first : first + PIECE_BYTES]
            while self._sections and len(self._pending) >= self._sections[0].unit_bytes:
                self._write_units(self._sections[0])
        if self._pending and not self._sections:
            raise InvalidSnapshot(f"the KV payload has {len(self._pending)} bytes too many")

    def check_whole(self) -> None:
        """Refuse a payload that has ended early: ``InvalidSnapshot``."""
        if self._sections:
            raise InvalidSnapshot("the KV payload ends early")

    def _write_units(self, section: Section) -> None:
        n = min(len(self._pending) // section.unit_bytes, section.n_units - self._n_written)
        with memoryview(self._pending) as pending:
            units = bytes(pending[: n * section.unit_bytes])
        section.write(self._n_written, units)
        del self._pending[: len(units)]
        self._n_written += n
        if self._n_written == section.n_units:
            self._sections.popleft()
            self._n_written = 0


def whole(payload: bytes | Pieces) -> bytes:
    """A payload whose pieces are joined."""
    return b"".join(payload.pieces) if isinstance(payload, Pieces) else payload


class Receiver:
    """Where the payload of a dump goes while the dump is read.

    Args:
        is_used: whether it is used; otherwise its bytes are passed over.
        new_writer: makes what takes it in, or gives None where its pieces are to be joined.

    Attributes:
        fits: whether the payload is of the context's own format.
        writer: what has taken it in.
    """

    def __init__(
        self,
        fits: Callable[[PayloadHeader], bool],
        is_used: Callable[[PayloadHeader], bool],
        new_writer: Callable[[PayloadHeader], PayloadWriter | None],
    ) -> None:
        self._fits, self._is_used, self._new_writer = fits, is_used, new_writer
        self._pieces: list[bytes] = []
        self.fits = False
        self.writer: PayloadWriter | None = None

    def begin(self, header: PayloadHeader) -> Callable[[memoryview], None]:
        """The payload begins; returns what to call with its pieces."""
        self.fits = header.end > 0 and self._fits(header)
        if not (self.fits and self._is_used(header)):
            return lambda piece: None
        self.writer = self._new_writer(header)
        return self._join if self.writer is None else self.writer.write

    def payload(self) -> bytes:
        """The payload, where no writer has it; once."""
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _join(self, piece: memoryview) -> None:
        self._pieces.append(bytes(piece))
