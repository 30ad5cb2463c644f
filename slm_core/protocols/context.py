"""The noun Context: one mutable KV cache over one model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from slm_core.protocols.batch import Batch
from slm_core.types import Capability, ContextOptions, EditLevel, Logits, Pos, States, TopLogits


class Context(Protocol):
    """Several token histories in one KV cache.

    All or nothing: a call that raises leaves lengths and later logits as they were. Not for concurrent use: a
    second thread inside a call gets ``ContextBusy``. Any call after ``close`` raises ``ContextClosed``.
    """

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The optional capabilities of this context."""
        ...

    @property
    def edit_level(self) -> EditLevel:
        """The highest edit that works; above it ``UnsupportedEdit`` is raised."""
        ...

    @property
    def options(self) -> ContextOptions:
        """The options that ``new_context`` got: sizes and KV types."""
        ...

    @property
    def n_ctx(self) -> int:
        """The number of positions for all sequences together; shared positions count once."""
        ...

    @property
    def n_batch(self) -> int:
        """The largest number of tokens in one ``decode``."""
        ...

    @property
    def n_embd(self) -> int:
        """E: the width of embedding rows and hidden states; 0 if the context neither takes nor returns them."""
        ...

    @property
    def n_seq_max(self) -> int:
        """The number of sequences, 0 to n_seq_max - 1; each is empty at first."""
        ...

    @property
    def n_free(self) -> int:
        """The number of free positions."""
        ...

    def length(self, seq_id: int) -> int:
        """The number of tokens of a sequence."""
        ...

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """The tokens of a sequence, in order; ``EMBEDDED`` for each embedding row."""
        ...

    def n_exclusive(self, seq_id: int) -> int:
        """Positions that dropping a sequence would free: positions that it does not share.

        Raises:
            InvalidSequence: there is no such sequence.
        """
        ...

    def adapters(self, seq_id: int) -> Mapping[str, float]:
        """The adapters of a sequence, by name, with their scales.

        Raises:
            InvalidSequence: there is no such sequence.
        """
        ...

    def set_adapters(self, seq_id: int, scales: Mapping[str, float]) -> None:
        """Replace the adapters of an empty sequence by these adapters of the model.

        Their changes are added, each multiplied by its scale. The sequence keeps them when it is emptied. ``fork``
        copies them, and ``restore`` replaces them by the adapters of the dump. Sequences with different adapters may
        share a batch.

        Raises:
            UnsupportedInput: ``ADAPTERS`` is not declared.
            InvalidOption: there is no such adapter, or a scale is not a number from -1e6 to 1e6.
            InvalidSequence: there is no such sequence, or it has tokens that were decoded with other adapters.
        """
        ...

    def new_batch(self, capacity: int | None = None) -> Batch:
        """An empty batch; ``capacity`` defaults to ``n_batch`` and may not exceed it (``InvalidOption``)."""
        ...

    def decode(self, batch: Batch) -> Logits:
        """Run a batch; returns the requested rows, float32 [n_rows, V], in the order of the batch.

        A sequence gives the same logits, within tolerance, in a batch with other sequences as alone, and in chunks as
        in one batch. An empty batch returns no rows and changes nothing.

        Raises:
            InvalidToken, InvalidSequence: outside the vocabulary or the context.
            InvalidPosition: not the next position of its sequence.
            InvalidEmbedding: embedding rows of another width than the model's.
            BatchFull: more than ``n_batch`` tokens.
            ContextFull: not enough free positions.
            DecodeFailed: the engine reported a failure, or a requested row has NaN or infinity.
            UnsupportedOutput: an encoder, which has no logits.
            UnsupportedInput: embedding rows, bidirectional blocks, offsets or an attention bias, if the context does
                not declare ``EMBEDDING_INPUT``, ``BIDIRECTIONAL_BLOCKS``, ``MROPE_POSITIONS`` or ``ATTENTION_BIAS``;
                or rows whose offsets do not increase, if the engine requires this.
        """
        ...

    def decode_top(self, batch: Batch, k: int) -> TopLogits:
        """Run a batch like ``decode``; returns the k largest logits and the log-sum-exp of each requested row.

        The logits equal the logits of ``decode``, and the result never changes later. Calls of ``decode`` and
        ``decode_top`` may alternate.

        Raises:
            UnsupportedOutput: ``DEVICE_SAMPLING`` is not declared.
            InvalidOption: k is not 1 to V.
            InvalidToken, InvalidSequence, InvalidPosition, BatchFull, ContextFull, DecodeFailed: as in ``decode``.
        """
        ...

    def embed(self, batch: Batch) -> States:
        """Run a batch like ``decode``; returns hidden states instead of logits, float32 [n_rows, E].

        They are the output of the last norm, or of the dense layers that some embedding models add after it. Calls of
        ``embed`` and ``decode`` may alternate. If ``ENCODER`` is declared, a batch contains whole sequences, which are
        empty again afterwards.

        Raises:
            UnsupportedOutput: ``EMBEDDINGS`` is not declared.
            InvalidToken, InvalidSequence, InvalidPosition, InvalidEmbedding, UnsupportedInput, BatchFull,
                ContextFull, DecodeFailed: as in ``decode``.
        """
        ...

    def layer_states(self, batch: Batch, layers: Sequence[int]) -> States:
        """Run a batch like ``decode``; returns hidden states after layers, float32 [len(layers), n_rows, E].

        The output of a layer is the residual stream after it, with the directions of control vectors and without the
        model's last norm. Calls of ``layer_states``, ``embed`` and ``decode`` may alternate; encoders are as in
        ``embed``.

        Args:
            batch: the batch.
            layers: numbers of layers, 0 to L - 1, in any order.

        Raises:
            UnsupportedOutput: ``LAYER_STATES`` is not declared.
            InvalidOption: an empty list of layers, or a layer that the model lacks.
            InvalidToken, InvalidSequence, InvalidPosition, InvalidEmbedding, UnsupportedInput, BatchFull,
                ContextFull, DecodeFailed: as in ``decode``.
        """
        ...

    def draft(self, seq_id: int, token: int, n: int, k: int = 1) -> TopLogits:
        """Predict the ``n`` tokens after ``token``, which follows a sequence, with the model's MTP layers.

        Nothing changes. Row i has the k largest logits after ``token`` and i predicted tokens; the prediction is the
        token with the largest logit. The rows depend on the tokens, the edits and the adapters of the sequence only,
        within tolerance.

        Args:
            seq_id: the sequence; it may be empty.
            token: the next token of the sequence, which is not decoded.
            n: the number of predictions, which need n free positions.
            k: number of logits in each row.

        Raises:
            UnsupportedOutput: ``MTP`` is not declared.
            InvalidToken, InvalidSequence: outside the vocabulary or the context.
            InvalidOption: n is below 1, or k is not 1 to V.
            ContextFull: fewer than n positions are free.
            DecodeFailed: the engine reported a failure.
        """
        ...

    def fork(self, src: int, dst: int, end: int | None = None) -> Pos:
        """Make the empty sequence ``dst`` a copy of ``src[:end]``; returns the position of the next token of ``dst``.

        Raises:
            InvalidSequence: dst is not empty, or src and dst are the same.
            InvalidPosition: ``end`` is outside src, or inside a bidirectional block.
            ContextFull: the fork has to copy (storage is not shared, or ``end`` splits an image) and there is no room.
        """
        ...

    def fork_cost(self, src: int, end: int | None = None) -> int:
        """The number of tokens of ``src`` that ``fork(src, dst, end)`` would decode again; nothing changes.

        Full attention needs none. Recurrent states, and keys and values that a sliding window has dropped, are computed
        again from the last position for which they are stored.

        Raises:
            InvalidSequence: there is no such sequence.
            InvalidPosition: ``end`` is outside src, or inside a bidirectional block.
            UnsupportedEdit: the context cannot fork a part of a sequence.
        """
        ...

    def truncate(self, pos: Pos) -> Pos:
        """Remove the tokens of the sequence from ``pos.index`` on; at the length of the sequence, nothing changes.

        Past the length, or inside a bidirectional block, it raises ``InvalidPosition``. Decoding the same tokens again
        gives the same logits, within tolerance.
        """
        ...

    def cut(self, start: Pos, end: Pos) -> Pos:
        """Remove [start, end) of one sequence; later tokens move down, their keys are rotated again, their values stay.

        Returns the position of the next token. The result is not a fresh prefill of the remaining tokens: the values
        still depend on the removed tokens.

        Raises:
            UnsupportedEdit: below ``EditLevel.CUT``.
            InvalidPosition: end < start, or outside the sequence.
            InvalidSequence: start and end are in different sequences.
        """
        ...

    def drop(self, seq_id: int) -> None:
        """Empty one sequence; sequences that share its storage do not change."""
        ...

    def clear(self) -> None:
        """Empty all sequences."""
        ...

    def dump(self, seq_id: int) -> bytes:
        """The whole state of a sequence: tokens and rows, edit history, KV payload if declared, checksum."""
        ...

    def dump_parts(self, seq_id: int, part_bytes: int = 8 << 20) -> Iterator[bytes]:
        """The bytes of ``dump`` in parts of ``part_bytes`` (the last part is shorter), each made when it is requested.

        Between two parts, calls on other sequences are allowed. A part that raises ``ContextBusy`` can be requested
        again. An abandoned iterator holds no positions.

        Raises:
            InvalidSequence: there is no such sequence.
            InvalidOption: ``part_bytes`` is not 1 to 8 MiB.
            SequenceChanged: from a part: the sequence has changed since ``dump_parts`` was called.
            ContextClosed: from a part: the context is closed.
        """
        ...

    def restore(self, seq_id: int, data: bytes) -> Pos:
        """Replace a sequence by a dump of this or another backend; returns the position of the next token.

        Raises:
            InvalidSnapshot: the bytes are damaged.
            SnapshotMismatch: a dump of another model; rows, bidirectional blocks, offsets or biases that ``decode``
                would refuse; a block longer than ``n_batch``.
            ContextFull: no room.
        """
        ...

    def restore_parts(self, seq_id: int, parts: Iterable[bytes]) -> Pos:
        """Like ``restore``, for a dump in parts of any size.

        The parts are requested inside the call, so the iterator must not call the context. Its exceptions are raised,
        and nothing has changed.

        Raises:
            InvalidSnapshot, SnapshotMismatch, ContextFull: as in ``restore``.
        """
        ...

    def restore_steps(self, seq_id: int, parts: Iterable[bytes]) -> Iterator[None]:
        """Like ``restore_parts``, for an empty sequence, in steps. A step loads about one part; parts have any size.

        Between two steps, calls on other sequences are allowed. Until the last step, the sequence is empty, but may
        hold the positions that the dump needs. It can only be dropped, which cancels the restore. A step that raises,
        except for ``ContextBusy``, also cancels the restore. An abandoned iterator holds its positions until the
        sequence is dropped.

        Raises:
            InvalidSequence: there is no such sequence, or it is not empty; also from calls that would add tokens to the
                sequence before the last step.
            InvalidSnapshot, SnapshotMismatch, ContextFull: from a step, as in ``restore``.
            SequenceChanged: from a step: the sequence was dropped since ``restore_steps`` was called.
            ContextClosed: from a step: the context is closed.
        """
        ...

    def dump_context(self, part_bytes: int = 8 << 20) -> Iterator[bytes]:
        """The whole state of all sequences, in parts like ``dump_parts``; shared tokens are stored once.

        Raises:
            InvalidOption: ``part_bytes`` is not 1 to 8 MiB.
            SequenceChanged, ContextClosed: from a part, as in ``dump_parts``.
        """
        ...

    def restore_context(self, parts: Iterable[bytes]) -> None:
        """Fill an empty context from the dump of a context; sequences share storage again.

        Raises:
            InvalidSequence: the context is not empty, or lacks a sequence of the dump.
            InvalidSnapshot, SnapshotMismatch, ContextFull: as in ``restore_parts``; the context stays empty.
        """
        ...

    def close(self) -> None:
        """Free the memory now. A second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
