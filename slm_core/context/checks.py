"""Argument checks of a context. They run before anything changes, and change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slm_core.container import PART_BYTES
from slm_core.context.inputs import (
    Held,
    ahead_of,
    all_ahead_of,
    are_blocks,
    biases_of,
    offsets_of,
    row_of,
    rows_of,
    token_of,
)
from slm_core.context.ledger import Ledger, replay_plan
from slm_core.context.snapshot import PayloadHeader, SequenceSnapshot
from slm_core.embedding_rows import check_rows
from slm_core.errors import (
    BatchFull,
    ContextFull,
    DecodeFailed,
    InvalidOption,
    InvalidPosition,
    InvalidSequence,
    InvalidSnapshot,
    InvalidToken,
    SnapshotMismatch,
    UnsupportedEdit,
    UnsupportedInput,
)
from slm_core.numerics import as_integer, shown
from slm_core.protocols import Batch
from slm_core.types import EMBEDDED, Capability, ContextOptions, EditLevel

_LARGEST = {"n_ctx": 2**31 - 1, "n_seq_max": 1 << 16, "n_batch": 2**31 - 1}
"""Positions are int32. A context makes a record for each sequence at once."""


def check_context_options(options: ContextOptions) -> None:
    """Check the sizes of a context.

    Raises:
        InvalidOption: a size below 1, or larger than any context can have.
    """
    for name, largest in _LARGEST.items():
        value = getattr(options, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
            raise InvalidOption(f"{name}={shown(value)} (accepted: an integer from 1 to {largest})")


def check_position_limit(
    batch: Batch, n_positions: int | None, reason: str = "this model has learned positions"
) -> None:
    """Check a batch of a model with a limited number of positions.

    Args:
        batch: the batch.
        n_positions: the number of positions; None if there is no limit.
        reason: why they are limited: the message continues with the positions.

    Raises:
        InvalidPosition: a position is at or above ``n_positions``; the message has the number.
    """
    if n_positions is None or not len(batch):
        return
    i = int(np.argmax(batch.positions))
    if (last := int(batch.positions[i])) >= n_positions:
        seq_id = int(batch.seq_ids[i])
        raise InvalidPosition(
            f"position {last} of sequence {seq_id}: {reason} 0 to {n_positions - 1}",
            seq_id=seq_id,
        )


def check_part_bytes(part_bytes: int) -> None:
    """Raise ``InvalidOption`` if parts of a dump would be empty or larger than 8 MiB."""
    if not isinstance(part_bytes, int) or isinstance(part_bytes, bool) or not 1 <= part_bytes <= PART_BYTES:
        raise InvalidOption(f"part_bytes={part_bytes!r} (accepted: 1 to {PART_BYTES})")


@contextmanager
def failures_of(seq_ids: Sequence[int]) -> Iterator[None]:
    """Add the sequence id to an engine failure in the ``with`` block, if the call has only one sequence."""
    try:
        yield
    except DecodeFailed as error:
        if len(seq_ids) == 1:
            error.attribute_to(seq_ids[0])
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The declarations of a backend about a context: arguments of ``ContextBase``."""

    options: ContextOptions
    backend: str
    fingerprint: str
    n_vocab: int
    edit_level: EditLevel
    capabilities: frozenset[Capability]
    payload_format: str
    n_embd: int
    n_layers: int

    def fits_payload(self, header: PayloadHeader) -> bool:
        """Whether the context can load the dump's KV payload without decoding again."""
        same_engine = (header.backend, header.payload_format) == (self.backend, self.payload_format)
        return same_engine and Capability.KV_PAYLOAD in self.capabilities and header.n_bytes > 0


class Checks:
    """The checks of one context.

    Args:
        declared: sizes and capabilities of the context.
        ledger: the ledger of the context; only read.
    """

    def __init__(self, declared: Declaration, ledger: Ledger) -> None:
        self._declared = declared
        self._ledger = ledger

    def level(self, level: EditLevel) -> None:
        """Raise ``UnsupportedEdit`` for an edit above the declared level."""
        declared = self._declared.edit_level
        if declared < level:
            alternative = "truncate" if declared >= EditLevel.TRUNCATE else "drop"
            raise UnsupportedEdit(
                f"this context cannot {level.name.lower()} (its edit level is {declared.name}):"
                f" {alternative} the sequence and decode the kept tokens again, or let a Session do it"
            )

    def layers(self, layers: Sequence[int]) -> list[int]:
        """Check numbers of layers and return them; raises ``InvalidOption``."""
        n = self._declared.n_layers
        if isinstance(layers, int | float) or not isinstance(layers, Iterable):
            raise InvalidOption(f"layers={shown(layers)} (accepted: a list of numbers from 0 to {n - 1})")
        numbers = [int(layer) for layer in layers if isinstance(layer, int | np.integer)]
        if not numbers or len(numbers) < len(layers) or not all(0 <= layer < n for layer in numbers):
            raise InvalidOption(f"layers={list(layers)[:20]} (accepted: one or more of 0 to {n - 1})")
        return numbers

    def sequence(self, seq_id: int) -> int:
        """Check a sequence id and return it; raises ``InvalidSequence``."""
        n_seq_max, checked = self._declared.options.n_seq_max, as_integer(seq_id)
        if checked is None or not 0 <= checked < n_seq_max:
            raise InvalidSequence(f"no sequence {seq_id} (accepted: 0 to {n_seq_max - 1})", seq_id=checked)
        return checked

    def changeable(self, seq_id: int) -> int:
        """Check the id of a sequence to fill and return it; raises ``InvalidSequence`` while it is being restored."""
        checked = self.sequence(seq_id)
        if self._ledger.is_restoring(checked):
            raise InvalidSequence(
                f"sequence {checked} is being restored: make all steps of restore_steps, or drop it", seq_id=checked
            )
        return checked

    def index(self, seq_id: int, index: int) -> int:
        """Check a position and return it: from 0 to the length of the sequence; else raises ``InvalidPosition``."""
        length, checked = self._ledger.length(seq_id), as_integer(index)
        if checked is None or not 0 <= checked <= length:
            raise InvalidPosition(
                f"position {index} is outside sequence {seq_id} (accepted: 0 to {length})", seq_id=seq_id
            )
        return checked

    def whole_blocks(self, seq_id: int, length: int) -> None:
        """Raise ``InvalidPosition`` if a length splits a bidirectional block: its tokens attend to the whole block."""
        inputs = self._ledger.inputs(seq_id)
        if length == 0 or length == len(inputs) or not ahead_of(inputs[length - 1]):
            return
        begin = next(i for i in range(length - 1, -1, -1) if i == 0 or not ahead_of(inputs[i - 1]))
        raise InvalidPosition(
            f"position {length} of sequence {seq_id} lies in a bidirectional block (accepted: {begin}, where the block"
            " begins, or a position after the block)",
            seq_id=seq_id,
        )

    def room(self, needed: int, seq_id: int) -> None:
        """Raise ``ContextFull`` if a sequence needs more positions than are free."""
        if needed > self._ledger.n_free:
            raise ContextFull(needed, self._ledger.n_free, seq_id=seq_id)

    def n_top(self, k: int) -> None:
        """Raise ``InvalidOption`` if k is not 1 to V."""
        n_vocab = self._declared.n_vocab
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= n_vocab:
            raise InvalidOption(f"k={k!r} (accepted: 1 to {n_vocab}, the size of the vocabulary)")

    def draft(self, seq_id: int, token: int, n: int, k: int) -> int:
        """Check the arguments of ``Context.draft``; returns the sequence, or raises its errors."""
        seq_id = self.changeable(seq_id)
        self.n_top(k)
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise InvalidOption(f"n={n!r} (accepted: an integer from 1 on)")
        if not isinstance(token, int | np.integer) or not 0 <= token < self._declared.n_vocab:
            last = self._declared.n_vocab - 1
            raise InvalidToken(f"token {token!r} is outside the vocabulary (accepted: 0 to {last})", seq_id=seq_id)
        self.room(n, seq_id)
        return seq_id

    # A batch.

    def batch(self, batch: Batch) -> list[int]:
        """Check a batch; returns its sequences, each once. Raises the errors of ``Context.decode``."""
        tokens, seq_ids, positions = batch.tokens, batch.seq_ids, batch.positions
        n, n_batch = len(tokens), self._declared.options.n_batch
        if n > n_batch:
            raise BatchFull(f"a batch of {n} tokens is more than one decode carries (n_batch is {n_batch})")
        if n == 0:
            return []
        n_rows = self._batch_extras(batch)
        if tokens.min() < 0 or tokens.max() >= self._declared.n_vocab or n_rows:
            self._batch_ids(tokens, seq_ids, n_rows)
        sequences = [int(seq_ids[0])] if (seq_ids == seq_ids[0]).all() else np.unique(seq_ids).tolist()
        for seq_id in sequences:
            sequence_positions = positions if len(sequences) == 1 else positions[seq_ids == seq_id]
            self._batch_positions(self.changeable(seq_id), sequence_positions)
        if n > (n_free := self._ledger.n_free):
            raise ContextFull(n, n_free, seq_id=int(seq_ids[n_free]))
        return sequences

    def _batch_extras(self, batch: Batch) -> int:
        """Check embedding rows, their offsets and biases, and bidirectional blocks; returns the number of rows."""
        rows = batch.embeddings
        if len(rows):
            self._supported(Capability.EMBEDDING_INPUT, "embedding rows")
            check_rows(rows, self._declared.n_embd)
        if len(batch.offsets):
            self._supported(Capability.MROPE_POSITIONS, "offsets of rows")
        if len(batch.bias):
            self._supported(Capability.ATTENTION_BIAS, "attention bias of rows")
        if batch.ahead.any():
            self._supported(Capability.BIDIRECTIONAL_BLOCKS, "bidirectional blocks")
            follows = (np.diff(batch.seq_ids) == 0) & (np.diff(batch.positions) == 1)
            if not are_blocks(batch.ahead) or not follows[batch.ahead[:-1] > 0].all():
                raise InvalidOption(
                    "the batch has a bidirectional block that is not a run of one"
                    " sequence (Batch.join_block makes them)"
                )
        return len(rows)

    def _supported(self, capability: Capability, kind: str) -> None:
        if capability not in self._declared.capabilities:
            raise UnsupportedInput(
                f"the backend {self._declared.backend} takes no {kind} for this model: it does not declare {capability}"
            )

    def _batch_ids(self, tokens: NDArray[np.int32], seq_ids: NDArray[np.int32], n_rows: int) -> None:
        outside = (tokens < 0) | (tokens >= self._declared.n_vocab)
        if np.count_nonzero(tokens == EMBEDDED) == n_rows:
            outside &= tokens != EMBEDDED
        if outside.any():
            bad, seq_id, last = tokens[outside][0], int(seq_ids[outside][0]), self._declared.n_vocab - 1
            raise InvalidToken(
                f"token {bad} of sequence {seq_id} is outside the vocabulary (accepted: 0 to {last})", seq_id=seq_id
            )

    def _batch_positions(self, seq_id: int, positions: NDArray[np.int32]) -> None:
        length = self._ledger.length(seq_id)
        expected = np.arange(length, length + len(positions), dtype=np.int32)
        is_wrong = positions != expected
        if is_wrong.any():
            i = int(np.flatnonzero(is_wrong)[0])
            raise InvalidPosition(
                f"position {positions[i]} is not the next of sequence {seq_id} (accepted: {expected[i]},"
                f" because the sequence has {length} tokens and the batch has {i} before it)",
                seq_id=seq_id,
            )

    # A dump.

    def dumped_inputs(self, snapshot: SequenceSnapshot) -> None:
        """Check tokens, rows, offsets, biases and blocks of a dump, like ``decode`` checks a batch.

        Raises:
            InvalidSnapshot: values that are invalid for this model.
            SnapshotMismatch: a dump of another model, or inputs that this context does not support.
        """
        declared = self._declared
        if snapshot.fingerprint != declared.fingerprint:
            raise SnapshotMismatch(
                f"the dump is of another model (fingerprint {snapshot.fingerprint[:12]}..., this model's is"
                f" {declared.fingerprint[:12]}...)"
            )
        inputs = snapshot.every_input()
        if (rows := rows_of(inputs)).size:
            self._dumped_rows(rows)
            self._dumped_offsets(inputs)
            self._dumped_biases(inputs)
        ids = [token_of(one) for one in inputs if row_of(one) is None]
        if ids and not (min(ids) >= 0 and max(ids) < declared.n_vocab):
            raise InvalidSnapshot(
                f"the dump holds tokens outside the vocabulary (accepted: 0 to {declared.n_vocab - 1})"
            )
        if inputs and Capability.ENCODER in declared.capabilities:
            raise InvalidSnapshot("the dump contains tokens, but an encoder stores none")
        self._dumped_blocks(replay_plan(snapshot.held(), snapshot.edits)[0])

    def dumped_room(self, seq_id: int, snapshot: SequenceSnapshot, *, has_payload: bool) -> None:
        """Check that a dump fits and that its edits can be repeated.

        Args:
            seq_id: the sequence to replace.
            snapshot: the dump.
            has_payload: whether the payload is loaded; else the dump is decoded again.

        Raises:
            UnsupportedEdit: the edit history has cuts, and the context cannot cut.
            ContextFull: no room.
        """
        needed = len(snapshot.tokens)
        if not has_payload:
            if snapshot.edits:
                self.level(EditLevel.CUT)
            _, needed = replay_plan(snapshot.held(), snapshot.edits)
        # If the load fails, the old contents are restored, without shared storage. They need room, too.
        needed = max(needed, self._ledger.length(seq_id))
        free = self.replaceable(seq_id)
        if needed > free:
            raise ContextFull(needed, free, seq_id=seq_id)

    def replaceable(self, seq_id: int) -> int:
        """The largest number of positions for the new contents of a sequence."""
        return self._ledger.n_free + self._ledger.n_exclusive(seq_id)

    def _dumped_rows(self, rows: NDArray[np.float32]) -> None:
        if Capability.EMBEDDING_INPUT not in self._declared.capabilities:
            raise SnapshotMismatch(
                f"the dump holds {len(rows)} embedding rows, which the backend {self._declared.backend} does not take"
                f" for this model (restore it in a context where {Capability.EMBEDDING_INPUT} is declared)"
            )
        if rows.shape[1] != self._declared.n_embd:
            width = self._declared.n_embd
            raise InvalidSnapshot(f"the dump's embedding rows are {rows.shape[1]} wide (accepted: {width})")

    def _dumped_offsets(self, inputs: Sequence[Held]) -> None:
        if len(offsets_of(inputs)) and Capability.MROPE_POSITIONS not in self._declared.capabilities:
            raise SnapshotMismatch(
                f"the dump holds rows with offsets, which the backend {self._declared.backend} does not take for this"
                f" model (restore it in a context where {Capability.MROPE_POSITIONS} is declared)"
            )

    def _dumped_biases(self, inputs: Sequence[Held]) -> None:
        if len(biases_of(inputs)) and Capability.ATTENTION_BIAS not in self._declared.capabilities:
            raise SnapshotMismatch(
                f"the dump holds rows with an attention bias, which the backend {self._declared.backend} does not take"
                f" for this model (restore it in a context where {Capability.ATTENTION_BIAS} is declared)"
            )

    def _dumped_blocks(self, runs: Sequence[Sequence[Held]]) -> None:
        for ahead in map(all_ahead_of, runs):
            if not len(ahead):
                continue
            if not are_blocks(ahead):
                raise InvalidSnapshot("the dump holds parts of bidirectional blocks")
            declared = Capability.BIDIRECTIONAL_BLOCKS in self._declared.capabilities
            if not declared or ahead.max() >= self._declared.options.n_batch:
                raise SnapshotMismatch(
                    f"the dump holds bidirectional blocks of up to {ahead.max() + 1} tokens (restore it where"
                    f" {Capability.BIDIRECTIONAL_BLOCKS} is declared and n_batch is at least {ahead.max() + 1})"
                )
