"""The state of one sequence in a dump. All values are checked on reading."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from slm_core.adapters import MAX_SCALE
from slm_core.container import Incoming, Pieces, check_numbers, is_count, pack, unpack
from slm_core.context.inputs import (
    NO_AHEAD,
    NO_BIAS,
    NO_OFFSETS,
    NO_ROWS,
    Held,
    ahead_of,
    all_ahead_of,
    bias_of,
    biases_of,
    held_inputs,
    offset_of,
    offsets_of,
    row_of,
    rows_of,
    token_ids,
)
from slm_core.embedding_rows import MAX_BIAS, MAX_OFFSET
from slm_core.errors import InvalidSnapshot
from slm_core.types import EMBEDDED

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Edit:
    """One ``cut`` in the history of a sequence.

    Attributes:
        start: the first position of the cut.
        removed: the removed inputs.
        length_before: the number of tokens before the cut.
    """

    start: int
    removed: tuple[Held, ...]
    length_before: int

    @property
    def end(self) -> int:
        """The end of the cut: the position after the last removed token."""
        return self.start + len(self.removed)


class PayloadHeader(NamedTuple):
    """The description of a KV payload in a dump.

    Attributes:
        backend: the name of the backend that made it.
        payload_format: the name of its layout.
        fingerprint: the fingerprint of the model.
        start: the first position in the payload; earlier positions are shared with another sequence.
        end: the length of the sequence.
        n_bytes: bytes of the payload.
    """

    backend: str
    payload_format: str
    fingerprint: str
    start: int
    end: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """The complete state of one sequence.

    Attributes:
        backend: the name of the backend that made it.
        payload_format: the name of the layout of ``payload``. A context with the same format loads it as it is.
        fingerprint: the fingerprint of the model.
        tokens: int32 [S], ``EMBEDDED`` for each embedding row; positions are 0 to S-1.
        edits: the cuts, oldest first. Tokens and edits are enough to rebuild the KV cache.
        payload: the KV cache in the layout of the backend, or b"".
        rows: the embedding rows of ``tokens``, float32 [n, E]. Edits contain their own rows.
        ahead: for each token, the number of later tokens in its bidirectional block, int32 [S]; [0] without blocks.
        offsets: the M-RoPE offset of each of ``rows``, int32 [n, 3]; [0, 3] if all are at default positions.
        adapters: the scale of each adapter, by the adapter's fingerprint.
        bias: the attention bias of each of ``rows``, float32 [n]; [0] if all are 0.
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
    adapters: Mapping[str, float] = field(default_factory=dict)
    bias: NDArray[np.float32] = field(default_factory=lambda: NO_BIAS)

    def held(self) -> list[Held]:
        """The inputs of the sequence."""
        return held_inputs(self.tokens, rows=self.rows, ahead=self.ahead, offsets=self.offsets, bias=self.bias)

    def every_input(self) -> list[Held]:
        """The inputs of the sequence, and the inputs that its cuts removed."""
        return [*self.held(), *(one for edit in self.edits for one in edit.removed)]

    def to_bytes(self) -> bytes:
        """The dump: a container of kind "sequence"."""
        return pack("sequence", self.meta(), self.sections(self.payload))

    def meta(self) -> dict[str, object]:
        """The metadata of the sections, as JSON values."""
        return {
            "backend": self.backend,
            "payload_format": self.payload_format,
            "fingerprint": self.fingerprint,
            "edits": [[e.start, len(e.removed), e.length_before] for e in self.edits],
            **({_ADAPTERS: self.adapters} if self.adapters else {}),
        }

    def sections(self, payload: bytes | Pieces) -> list[bytes | Pieces]:
        """Tokens, removed tokens, payload, rows, blocks, offsets, biases. Empty sections at the end are left out."""
        removed = [one for e in self.edits for one in e.removed]
        ids = self.tokens.astype("<i4").tobytes(), np.array(token_ids(removed), "<i4").tobytes()
        more = [
            b"".join(part.astype("<f4").tobytes() for part in (self.rows, rows_of(removed))),
            _packed(self.ahead if len(self.ahead) else [0] * len(self.tokens), map(ahead_of, removed)),
            _packed(
                self.offsets if len(self.offsets) else [(0, 0, 0)] * len(self.rows),
                (offset_of(one) for one in removed if row_of(one) is not None),
            ),
            _packed(
                self.bias if len(self.bias) else [0.0] * len(self.rows),
                (bias_of(one) for one in removed if row_of(one) is not None),
                "<f4",
            ),
        ]
        while more and not more[-1]:
            more.pop()
        return [*ids, payload, *more]

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a dump and check all values.

        Raises:
            InvalidSnapshot, SnapshotMismatch: see ``unpack``.
        """
        meta, sections = unpack("sequence", data)
        _check_shape(meta, len(sections))
        return cls._of(meta, sections)

    @classmethod
    def read(
        cls,
        meta: Mapping[str, object],
        incoming: Incoming,
        section_indices: range,
        receive: Callable[[PayloadHeader], Callable[[memoryview], None]],
        start: int = 0,
    ) -> Self:
        """Read a sequence from a container in parts and check all values; see ``read_steps``."""
        return drained(cls.read_steps(meta, incoming, section_indices, receive, start))

    @classmethod
    def read_steps(
        cls,
        meta: Mapping[str, object],
        incoming: Incoming,
        section_indices: range,
        receive: Callable[[PayloadHeader], Callable[[memoryview], None]],
        start: int = 0,
    ) -> Generator[None, None, Self]:
        """Read a sequence from a container, one piece a step. ``payload`` stays empty.

        Args:
            meta: the metadata of its sections.
            incoming: the container.
            section_indices: its sections, section_indices come next.
            receive: called at the start of the payload; returns the function for its pieces.
            start: the number of positions that come from another sequence; the sections contain the later ones.

        Raises:
            InvalidSnapshot: an invalid value, or the container ends early.
        """
        _check_shape(meta, len(section_indices))
        tokens = yield from _gathered(incoming.section(section_indices[0]))
        removed = yield from _gathered(incoming.section(section_indices[1]))
        end, n_bytes = start + len(_tokens(tokens)), incoming.lengths[section_indices[2]]
        backend, payload_format, fingerprint = (str(meta[name]) for name in _NAMES)
        write = receive(PayloadHeader(backend, payload_format, fingerprint, start, end, n_bytes))
        for piece in incoming.section(section_indices[2]):
            write(piece)
            yield
        more = []
        for i in section_indices[3:]:
            more.append((yield from _gathered(incoming.section(i))))
        return cls._of(meta, [tokens, removed, b"", *more], start)

    def after(self, before: Sequence[Held]) -> SequenceSnapshot:
        """The complete sequence: other inputs, then these."""
        held = [*before, *self.held()]
        return replace(
            self,
            tokens=np.array(token_ids(held), np.int32),
            rows=rows_of(held),
            ahead=all_ahead_of(held),
            offsets=offsets_of(held),
            bias=biases_of(held),
        )

    @classmethod
    def _of(cls, meta: Mapping[str, object], sections: Sequence[bytes], start: int = 0) -> Self:
        tokens, removed = _tokens(sections[0]), _tokens(sections[1])
        n_present, n_removed = (int(np.count_nonzero(ids == EMBEDDED)) for ids in (tokens, removed))
        rows = _rows(sections[3] if len(sections) > 3 else b"", n_present + n_removed)
        ahead = _ahead(sections[4] if len(sections) > 4 else b"", len(tokens) + len(removed))
        offsets = _offsets(sections[5] if len(sections) > 5 else b"", n_present + n_removed)
        bias = _bias(sections[6] if len(sections) > 6 else b"", n_present + n_removed)
        cut_inputs = held_inputs(
            removed,
            rows=rows[n_present:],
            ahead=ahead[len(tokens) :],
            offsets=offsets[n_present:],
            bias=bias[n_present:],
        )
        return cls(
            **{name: str(meta[name]) for name in _NAMES},
            tokens=tokens,
            edits=_read_edits(meta["edits"], cut_inputs, start + len(tokens)),
            payload=sections[2],
            rows=rows[:n_present],
            ahead=ahead[: len(tokens)],
            offsets=offsets[:n_present],
            adapters=_adapters(meta.get(_ADAPTERS, {})),
            bias=bias[:n_present],
        )


def drained(steps: Generator[None, None, T]) -> T:
    """Make all steps at once; returns the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def _gathered(pieces: Iterable[memoryview]) -> Generator[None, None, bytes]:
    gathered = []
    for piece in pieces:
        gathered.append(bytes(piece))
        yield
    return b"".join(gathered)


_NAMES = ("backend", "payload_format", "fingerprint")
_ADAPTERS = "adapters"


def _check_shape(meta: Mapping[str, object], n_sections: int) -> None:
    has_known_keys = set(meta) - {_ADAPTERS} == {*_NAMES, "edits"} and all(isinstance(meta[n], str) for n in _NAMES)
    if not has_known_keys or not 3 <= n_sections <= 7:
        raise InvalidSnapshot("a part of the dump of a sequence is missing")


class Share(NamedTuple):
    """A sequence in the dump of a context.

    Attributes:
        seq_id: the sequence.
        src: the sequence with which it shares its first positions; itself if it shares none.
        start: the number of shared positions.
        sections: its sections in the container.
        meta: the metadata of the sections.
    """

    seq_id: int
    src: int
    start: int
    sections: range
    meta: Mapping[str, object]


def read_shares(incoming: Incoming) -> list[Share]:
    """The sequences in the dump of a context, in order.

    Raises:
        InvalidSnapshot: these sequences are not possible in a context.
    """
    rows, shares, n_sections = incoming.meta.get("sequences"), list[Share](), 0
    for row in rows if isinstance(rows, list) else [None]:
        if not isinstance(row, list) or len(row) != 5 or not all(is_count(n) for n in row[:4]):
            raise InvalidSnapshot("the dump's list of sequences is malformed")
        seq_id, src, start, n, meta = row
        if not isinstance(meta, dict) or (start > 0) != (src in {share.seq_id for share in shares}):
            raise InvalidSnapshot("the dump's list of sequences is malformed")
        shares.append(Share(seq_id, src, start, range(n_sections, n_sections + n), meta))
        n_sections += n
    if n_sections != len(incoming.lengths):
        raise InvalidSnapshot("the dump's list of sequences contradicts its sections")
    return shares


def _adapters(stored: object) -> dict[str, float]:
    """The scales of adapters by fingerprint, checked."""
    if not isinstance(stored, dict) or not all(type(x) is float and abs(x) <= MAX_SCALE for x in stored.values()):
        raise InvalidSnapshot("the dump's adapters are malformed")
    return stored


def _packed(present: NDArray[np.generic] | Sequence[object], removed: Iterable[object], dtype: str = "<i4") -> bytes:
    """The numbers of present inputs, then of removed inputs; b"" if all are 0."""
    numbers = np.array([*present, *removed], dtype)
    return numbers.tobytes() if numbers.any() else b""


def _tokens(section: bytes) -> NDArray[np.int32]:
    if len(section) % 4:
        raise InvalidSnapshot("the dump's tokens are not whole")
    return np.frombuffer(section, "<i4").astype(np.int32)


def _rows(section: bytes, n: int) -> NDArray[np.float32]:
    """The ``n`` embedding rows of a dump, [n, E]."""
    width, rest = divmod(len(section), 4 * max(1, n))
    if rest or (n > 0) != (width > 0):
        raise InvalidSnapshot(f"the dump has {len(section)} bytes of embedding rows, and {n} ids that stand for one")
    if n == 0:
        return NO_ROWS
    rows = np.frombuffer(section, "<f4").reshape(n, width).astype(np.float32)
    check_numbers(rows, "an embedding row of the dump")
    return rows


def _offsets(section: bytes, n: int) -> NDArray[np.int32]:
    """The offsets of the ``n`` rows of a dump, [n, 3]; [0, 3] if all are at default positions."""
    if len(section) not in (0, 12 * n):
        raise InvalidSnapshot(f"the dump has {len(section)} bytes of offsets for {n} rows")
    offsets = np.frombuffer(section, "<i4").astype(np.int32).reshape(-1, 3)
    if ((offsets < -2 * MAX_OFFSET) | (offsets > MAX_OFFSET)).any():
        raise InvalidSnapshot("the dump has offsets of rows that are out of range")
    return offsets


def _bias(section: bytes, n: int) -> NDArray[np.float32]:
    """The attention biases of the ``n`` rows of a dump, [n]; [0] if all are 0."""
    if len(section) not in (0, 4 * n):
        raise InvalidSnapshot(f"the dump has {len(section)} bytes of attention biases for {n} rows")
    bias = np.frombuffer(section, "<f4").astype(np.float32)
    if not (bias <= MAX_BIAS).all():
        raise InvalidSnapshot("the dump has an attention bias that is out of range")
    return bias


def _ahead(section: bytes, n: int) -> NDArray[np.int32]:
    """For each of ``n`` inputs of a dump, the number of later tokens in its bidirectional block; [0] without blocks."""
    if len(section) not in (0, 4 * n):
        raise InvalidSnapshot(f"the dump has {len(section)} bytes of bidirectional blocks for {n} inputs")
    ahead = np.frombuffer(section, "<i4").astype(np.int32)
    if (ahead < 0).any():
        raise InvalidSnapshot("the dump has a bidirectional block of negative length")
    return ahead


def _read_edits(rows: object, removed: Sequence[Held], n_tokens: int) -> tuple[Edit, ...]:
    """The edits, checked to be a possible history of ``n_tokens`` tokens."""
    if not isinstance(rows, list):
        raise InvalidSnapshot("the dump's edit history is malformed")
    edits: list[Edit] = []
    n_read = length = 0
    for row in rows:
        if not isinstance(row, list) or len(row) != 3 or not all(is_count(n) for n in row):
            raise InvalidSnapshot("the dump's edit history is malformed")
        start, n_removed, length_before = row
        if n_removed == 0 or start + n_removed > length_before or length_before < length:
            raise InvalidSnapshot("the dump's edit history contradicts itself")
        edits.append(Edit(start, tuple(removed[n_read : n_read + n_removed]), length_before))
        n_read, length = n_read + n_removed, length_before - n_removed
    if n_read != len(removed) or length > n_tokens:
        raise InvalidSnapshot("the dump's edit history contradicts its tokens")
    return tuple(edits)
