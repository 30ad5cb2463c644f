"""KV payloads in parts: parts of a dump that an engine makes on request, and pieces that it loads one by one."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple, TypeVar

from slm_core.container import Pieces
from slm_core.context.snapshot import PayloadHeader
from slm_core.errors import InvalidSnapshot, SequenceChanged

T = TypeVar("T")

PIECE_BYTES = 1 << 20
"""Bytes that an engine reads or writes at a time, or one unit. This bounds the extra memory of a dump."""


class PayloadWriter(abc.ABC):
    """Loads a payload piece by piece into storage that no sequence uses.

    The sequence does not change before ``put``. A writer without ``put`` needs no clean-up, unless it reserves storage
    (``_engine_reserving_writer``).
    """

    @abc.abstractmethod
    def write(self, piece: memoryview) -> None:
        """Load the next bytes; they are valid until the call returns.

        Raises:
            InvalidSnapshot: too many bytes, or numbers that no model computes: NaN, infinite or too large.
        """

    @abc.abstractmethod
    def put(self) -> None:
        """End of the payload: it replaces the contents of the sequence.

        Raises:
            InvalidSnapshot: bytes are missing; nothing changed.
        """

    @abc.abstractmethod
    def undo(self) -> None:
        """Undo ``put``, which may have failed: the sequence has its old contents. Frees reserved storage."""


class Steps(Generic[T]):
    """The parts of a dump, or the steps of a restore. Each is made when it is requested.

    Args:
        steps: the iterator of the steps.
        call: the context manager around each step; it raises if no more steps can be made.
    """

    def __init__(self, steps: Iterator[T], call: Callable[[], AbstractContextManager[None]]) -> None:
        self._steps = steps
        self._call = call
        self._error: BaseException | None = None  # raised by the last step

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._error is not None:
            raise self._error
        try:
            with self._call():
                return self._next_step()
        except SequenceChanged:
            self.forget()
            raise

    def _next_step(self) -> T:
        try:
            return next(self._steps)
        except BaseException as error:  # also the end; later steps would not complete the dump or the restore
            self._error = error
            raise

    def forget(self) -> None:
        """Drop the iterator, and the state that it refers to."""
        self._steps = iter(())


class Section(NamedTuple):
    """Consecutive bytes of a payload for one array.

    Attributes:
        n_units: the number of tokens of an array of keys or values; 1 for a state.
        unit_bytes: bytes of a unit.
        write: writes whole units, from a given unit on; raises ``InvalidSnapshot`` for numbers that no model
            computes.
    """

    n_units: int
    unit_bytes: int
    write: Callable[[int, bytes], None]


class SectionWriter:
    """Writes the pieces of a payload to its sections.

    Args:
        sections: all sections, in order.
    """

    def __init__(self, sections: Iterable[Section]) -> None:
        self._sections = deque(section for section in sections if section.n_units * section.unit_bytes)
        self.n_bytes = sum(section.n_units * section.unit_bytes for section in self._sections)
        self._n_written = 0  # units of the first section
        self._pending = bytearray()

    def write(self, piece: memoryview) -> None:
        """Write the next bytes.

        Raises:
            InvalidSnapshot: too many bytes, or numbers that no model computes: NaN, infinite or too large.
        """
        for first in range(0, len(piece), PIECE_BYTES):
            self._pending += piece[first : first + PIECE_BYTES]
            while self._sections and len(self._pending) >= self._sections[0].unit_bytes:
                self._write_units(self._sections[0])
        if self._pending and not self._sections:
            raise InvalidSnapshot(f"the KV payload has {len(self._pending)} bytes too many")

    def check_whole(self) -> None:
        """Raise ``InvalidSnapshot`` if bytes are missing."""
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
    """The payload with its pieces joined."""
    return b"".join(payload.pieces) if isinstance(payload, Pieces) else payload


class Receiver:
    """Receives the payload while a dump is read.

    Args:
        is_used: whether the payload is loaded; else its bytes are skipped.
        new_writer: makes the writer of the payload; it returns None to join the pieces instead.

    Attributes:
        fits: whether the context can load the format of the payload.
        writer: the writer, if any.
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
        """Start of the payload; returns the function to call with its pieces."""
        self.fits = header.end > 0 and self._fits(header)
        if not (self.fits and self._is_used(header)):
            return lambda piece: None
        self.writer = self._new_writer(header)
        return self._join if self.writer is None else self.writer.write

    def payload(self) -> bytes:
        """The joined payload, if there is no writer. Call it once."""
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _join(self, piece: memoryview) -> None:
        self._pieces.append(bytes(piece))
