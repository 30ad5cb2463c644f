"""The noun Context: one mutable KV cache over one model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Protocol, Self

from slm_core.protocols.batch import Batch
from slm_core.types import Capability, EditLevel, Logits, Pos, States, TopLogits


class Context(Protocol):
    """Several token histories in one KV cache.

    All or nothing: a call that raises leaves lengths and later logits as they were. Not for concurrent use: a
    second thread inside a call gets ``ContextBusy``. Any call after ``close`` raises ``ContextClosed``.
    """

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What this context can do beyond the core."""
        ...

    @property
    def edit_level(self) -> EditLevel:
        """The highest edit that works; above it ``UnsupportedEdit`` is raised."""
        ...

    @property
    def n_ctx(self) -> int:
        """Positions that all sequences together may hold; shared storage counts once where it is shared."""
        ...

    @property
    def n_batch(self) -> int:
        """Tokens that one ``decode`` may carry."""
        ...

    @property
    def n_seq_max(self) -> int:
        """Sequences, named 0 to n_seq_max - 1; each is empty until written."""
        ...

    @property
    def n_free(self) -> int:
        """Positions that are free."""
        ...

    def length(self, seq_id: int) -> int:
        """Tokens that a sequence holds."""
        ...

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """The tokens that a sequence holds, in order; ``EMBEDDED`` for each embedding row."""
        ...

    def n_exclusive(self, seq_id: int) -> int:
        """Positions that dropping a sequence would free: those that it shares with no other.

        Raises:
            InvalidSequence: there is no such sequence.
        """
        ...

    def new_batch(self, capacity: int | None = None) -> Batch:
        """An empty batch; ``capacity`` defaults to ``n_batch`` and may not exceed it (``InvalidOption``)."""
        ...

    def decode(self, batch: Batch) -> Logits:
        """Run a batch; returns the rows asked for, float32 [n_rows, V], in the order of the batch.

        A sequence decoded among others, or in chunks, gives the logits that it gives alone, or whole, within
        tolerance. An empty batch gives no rows and changes nothing.

        Raises:
            InvalidToken, InvalidSequence: outside the vocabulary or the context.
            InvalidPosition: not the next position of its sequence.
            InvalidEmbedding: embedding rows of another width than the model's.
            BatchFull: more than ``n_batch`` tokens.
            ContextFull: not enough free positions.
            DecodeFailed: the engine reported a failure.
            UnsupportedOutput: an encoder, which has no logits.
            UnsupportedInput: embedding rows, bidirectional blocks or offsets, where the context does not declare
                ``EMBEDDING_INPUT``, ``BIDIRECTIONAL_BLOCKS`` or ``MROPE_POSITIONS``; or rows whose offsets do not
                increase, where the engine needs that.
        """
        ...

    def decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Run a batch as ``decode`` does, and give of each row asked for its k largest logits only, and their total.

        They are those of the row that ``decode`` would give, and nobody may write into them later. Calls of both may
        take turns.

        Raises:
            UnsupportedOutput: ``DEVICE_SAMPLING`` is not declared.
            InvalidOption: k is not 1 to V.
            InvalidToken, InvalidSequence, InvalidPosition, BatchFull, ContextFull, DecodeFailed: as ``decode``.
        """
        ...

    def embed(self, batch: Batch) -> States:
        """Run a batch as ``decode`` does, and give hidden states in place of logits, float32 [n_rows, E].

        They are those behind the last norm, and behind dense layers where a file has some for embeddings. Calls of
        ``embed`` and ``decode`` may take turns. Where ``ENCODER`` is declared, a batch holds whole sequences, which
        are empty again afterwards.

        Raises:
            UnsupportedOutput: ``EMBEDDINGS`` is not declared.
            InvalidToken, InvalidSequence, InvalidPosition, InvalidEmbedding, UnsupportedInput, BatchFull,
                ContextFull, DecodeFailed: as ``decode``.
        """
        ...

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Make the empty sequence ``dst`` a copy of ``src[:end]``; returns where dst's next token goes.

        Raises:
            InvalidSequence: dst is not empty, or src and dst are the same.
            InvalidPosition: ``end`` is outside src, or inside a bidirectional block.
            ContextFull: the fork has to copy (storage is not shared, or ``end`` splits an image) and there is no room.
        """
        ...

    def fork_cost(self, src: int, end: int | None = None) -> int:
        """Tokens of ``src`` that ``fork(src, dst, end)`` would decode again; nothing changes.

        Attention over all positions needs none. A recurrent state, or keys and values of a window that has passed, are
        computed again from the last position for which they are kept.

        Raises:
            InvalidSequence: there is no such sequence.
            InvalidPosition: ``end`` is outside src, or inside a bidirectional block.
            UnsupportedEdit: the context cannot fork a part of a sequence.
        """
        ...

    def truncate(self, pos: Pos) -> Pos:
        """Forget ``pos.index`` and all after it in that sequence; at the length a no-op.

        Past it, or inside a bidirectional block, ``InvalidPosition``.
        Decoding the same tail again gives the logits it gave before.
        """
        ...

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Forget [start, end) of one sequence; later tokens move down, keys re-rotated, values kept.

        Returns where the next token goes. Not a fresh prefill of what remains: values keep what they saw.

        Raises:
            UnsupportedEdit: below ``EditLevel.CUT``.
            InvalidPosition: end < start, or outside the sequence.
            InvalidSequence: start and end name two sequences.
        """
        ...

    def drop(self, seq_id: int) -> None:
        """Forget one sequence; others that share its storage stay as they are."""
        ...

    def clear(self) -> None:
        """Forget all sequences."""
        ...

    def dump(self, seq_id: int) -> bytes:
        """The whole state of a sequence: tokens and rows, edit history, KV payload where declared, checksum."""
        ...

    def dump_parts(self, seq_id: int, part_bytes: int = 8 << 20) -> Iterator[bytes]:
        """The bytes of ``dump`` in parts of ``part_bytes`` (the last is shorter), each made when it is asked for.

        Other calls may be made between two parts, on other sequences. A part that raises ``ContextBusy`` can be asked
        for again. An iterator that is given up holds nothing.

        Raises:
            InvalidSequence: there is no such sequence.
            InvalidOption: ``part_bytes`` is not 1 to 8 MiB.
            SequenceChanged: of a part: the sequence was changed since ``dump_parts`` was called.
            ContextClosed: of a part: the context was closed.
        """
        ...

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Replace a sequence by a dumped one, of this backend or of another; returns where the next token goes.

        Raises:
            InvalidSnapshot: the bytes are damaged.
            SnapshotMismatch: a dump of another model; rows, bidirectional blocks or offsets that ``decode`` would
                refuse; a block that is longer than ``n_batch``.
            ContextFull: no room.
        """
        ...

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """As ``restore``, of a dump that comes in parts of any size.

        The parts are asked for inside the call: they must not call the context. What they raise is raised, and nothing
        has changed.

        Raises:
            InvalidSnapshot, SnapshotMismatch, ContextFull: as ``restore``.
        """
        ...

    def dump_context(self, part_bytes: int = 8 << 20) -> Iterator[bytes]:
        """The whole state of all sequences, in parts as ``dump_parts``; what sequences share is in it once.

        Raises:
            InvalidOption: ``part_bytes`` is not 1 to 8 MiB.
            SequenceChanged, ContextClosed: of a part, as in ``dump_parts``.
        """
        ...

    def restore_context(self, parts: Iterable[bytes]) -> None:
        """Fill an empty context with the sequences of another; what they shared, they share again.

        Raises:
            InvalidSequence: the context holds tokens, or does not have a sequence of the dump.
            InvalidSnapshot, SnapshotMismatch, ContextFull: as ``restore_parts``; the context is empty as before.
        """
        ...

    def close(self) -> None:
        """Free the memory now. Twice is fine."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
