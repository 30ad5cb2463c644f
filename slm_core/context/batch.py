"""The implementation of ``protocols.Batch``: preallocated arrays, filled without loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from slm_core.context.inputs import NO_BIAS, NO_OFFSETS, NO_ROWS, from_each
from slm_core.display import count, signature
from slm_core.embedding_rows import check_bias, check_offsets, check_rows
from slm_core.errors import BatchFull, InvalidEmbedding, InvalidOption, InvalidPosition, InvalidSequence, InvalidToken
from slm_core.numerics import as_integer
from slm_core.types import EMBEDDED, LogitsSelection, Pos

_INT32_MAX = 2**31 - 1
_DType = TypeVar("_DType", bound=np.generic)


class TokenBatch:
    """Tokens to decode together.

    Args:
        capacity: the largest number of tokens.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InvalidOption(f"batch capacity is {capacity} (accepted: 1 or more)")
        self._tokens = np.empty(capacity, np.int32)
        self._seq_ids = np.empty(capacity, np.int32)
        self._positions = np.empty(capacity, np.int32)
        self._logits_mask = np.empty(capacity, np.bool_)
        self._ahead = np.zeros(capacity, np.int32)
        self._rows: list[NDArray[np.float32]] = []
        self._offsets: list[NDArray[np.int32]] = []  # one array for each array in _rows
        self._bias: list[NDArray[np.float32]] = []  # likewise
        self._length = 0

    def __repr__(self) -> str:
        return signature(self, f"{self._length:,} of {count(self.capacity, 'token')}")

    @classmethod
    def from_arrays(
        cls,
        *,
        tokens: NDArray[np.int32],
        seq_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        logits_mask: NDArray[np.bool_],
        ahead: NDArray[np.int32],
        embeddings: NDArray[np.float32],
        offsets: NDArray[np.int32],
        bias: NDArray[np.float32],
    ) -> Self:
        """The full batch with these arrays, which are not copied or checked; see ``protocols.Batch``."""
        batch = cls(max(1, len(tokens)))
        batch._tokens, batch._seq_ids, batch._positions = tokens, seq_ids, positions
        batch._logits_mask, batch._ahead, batch._length = logits_mask, ahead, len(tokens)
        if len(embeddings):
            batch._rows.append(embeddings)
        if len(offsets):
            batch._offsets.append(offsets)
        if len(bias):
            batch._bias.append(bias)
        return batch

    @property
    def capacity(self) -> int:
        """The largest number of tokens."""
        return len(self._tokens)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Token ids, int32 [T]."""
        return _readonly(self._tokens[: self._length])

    @property
    def embeddings(self) -> NDArray[np.float32]:
        """Embedding rows, float32 [n, E]."""
        return _readonly(np.concatenate(self._rows)) if self._rows else NO_ROWS

    @property
    def offsets(self) -> NDArray[np.int32]:
        """The M-RoPE offset of each row from its default position, int32 [n, 3]."""
        offsets = np.concatenate(self._offsets) if self._offsets else NO_OFFSETS
        return _readonly(offsets) if offsets.any() else NO_OFFSETS

    @property
    def bias(self) -> NDArray[np.float32]:
        """The attention bias of each row, float32 [n]."""
        if not self._bias:
            return NO_BIAS
        bias = np.concatenate(self._bias)
        return _readonly(bias) if bias.any() else NO_BIAS

    @property
    def ahead(self) -> NDArray[np.int32]:
        """For each token, the number of later tokens in its bidirectional block, int32 [T]."""
        return _readonly(self._ahead[: self._length])

    @property
    def seq_ids(self) -> NDArray[np.int32]:
        """The sequence of each token, int32 [T]."""
        return _readonly(self._seq_ids[: self._length])

    @property
    def positions(self) -> NDArray[np.int32]:
        """The position of each token in its sequence, int32 [T]."""
        return _readonly(self._positions[: self._length])

    @property
    def logits_mask(self) -> NDArray[np.bool_]:
        """The output mask: the tokens with a row of logits, bool [T]."""
        return _readonly(self._logits_mask[: self._length])

    def __len__(self) -> int:
        return self._length

    def add(self, token: int, pos: Pos, *, logits: bool = False) -> None:
        """Add one token; see ``protocols.Batch.add``."""
        self.extend((token,), pos, logits="last" if logits else "none")

    def extend(
        self, tokens: Sequence[int] | NDArray[np.integer], start: Pos, *, logits: LogitsSelection = "none"
    ) -> None:
        """Add a run of tokens from ``start`` on; see ``protocols.Batch.extend``."""
        self._add(_token_array(tokens), start, logits)

    def add_embeddings(
        self,
        rows: NDArray[np.float32],
        start: Pos,
        *,
        offsets: NDArray[np.integer] | None = None,
        bias: NDArray[np.float32] | None = None,
        logits: LogitsSelection = "none",
    ) -> None:
        """Add a run of embedding rows from ``start`` on; see ``protocols.Batch.add_embeddings``."""
        check_rows(rows)
        if offsets is not None:
            check_offsets(offsets, len(rows))
        if bias is not None:
            check_bias(bias, len(rows))
        if self._rows and rows.shape[1] != self._rows[0].shape[1]:
            raise InvalidEmbedding(
                f"embedding rows are {rows.shape[1]} wide (accepted: {self._rows[0].shape[1]},"
                " the width of the rows in the batch)"
            )
        self._add(np.full(len(rows), EMBEDDED, np.int32), start, logits)
        if len(rows):
            self._rows.append(rows.copy())
            defaults = np.zeros((len(rows), 3), np.int32)
            self._offsets.append(defaults if offsets is None else from_each(offsets.astype(np.int32)))
            self._bias.append(np.zeros(len(rows), np.float32) if bias is None else bias.copy())

    def _add(self, ids: NDArray[np.integer], start: Pos, logits: LogitsSelection) -> None:
        if logits not in ("none", "last", "all"):
            raise InvalidOption(f"logits={logits!r} (accepted: 'none', 'last', 'all')")
        n, first = len(ids), self._length
        seq_id, index = self._checked_start(start, n)
        if n > self.capacity - first:
            raise BatchFull(f"{n} tokens do not fit: {self.capacity - first} of {self.capacity} places are free")
        if n == 0:
            return
        end = first + n
        self._tokens[first:end] = ids
        self._seq_ids[first:end] = seq_id
        self._positions[first:end] = np.arange(index, index + n, dtype=np.int32)
        self._ahead[first:end] = 0
        self._logits_mask[first:end] = logits == "all"
        if logits == "last":
            self._logits_mask[end - 1] = True
        self._length = end

    def join_block(self, n: int) -> None:
        """Make the last ``n`` tokens one bidirectional block; see ``protocols.Batch.join_block``."""
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= self._length:
            raise InvalidOption(f"a block of {n!r} tokens (accepted: 1 to {self._length}, the number of added tokens)")
        run = slice(self._length - n, self._length)
        seq_ids, steps = self._seq_ids[run], np.diff(self._positions[run])
        in_blocks = self._ahead[max(0, run.start - 1) : run.stop]  # a block before the run may end in it
        if (seq_ids != seq_ids[0]).any() or (steps != 1).any() or in_blocks.any():
            raise InvalidOption(
                f"the last {n} tokens cannot be a bidirectional block"
                " (accepted: one sequence, positions without gaps, none in a block yet)"
            )
        self._ahead[run] = np.arange(n - 1, -1, -1)

    def clear(self) -> None:
        """Remove all tokens. The capacity stays."""
        self._rows.clear()
        self._offsets.clear()
        self._bias.clear()
        self._length = 0

    @staticmethod
    def _checked_start(start: Pos, n: int) -> tuple[int, int]:
        seq_id, index = as_integer(start.seq_id), as_integer(start.index)
        if seq_id is None or not 0 <= seq_id <= _INT32_MAX:
            raise InvalidSequence(f"seq_id {start.seq_id} is not a sequence (accepted: 0 or more)", seq_id=seq_id)
        if index is None or not 0 <= index <= _INT32_MAX - n:
            raise InvalidPosition(
                f"position {start.index} of sequence {seq_id} is out of range (accepted: 0 or more)", seq_id=seq_id
            )
        return seq_id, index


def _token_array(tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.integer]:
    """Token ids as an integer array [T]; raises ``InvalidToken`` if one is not a non-negative int32."""
    ids = np.asarray(tokens)
    if ids.size == 0 and ids.ndim == 1:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidToken(f"tokens must be a flat run of integers, not {ids.dtype} of shape {ids.shape}")
    if ids.min() < 0 or ids.max() > _INT32_MAX:
        bad = ids[(ids < 0) | (ids > _INT32_MAX)][0]
        raise InvalidToken(f"token {bad} is not a token id (accepted: 0 to the vocabulary's size - 1)")
    return ids


def _readonly(view: NDArray[_DType]) -> NDArray[_DType]:
    view.flags.writeable = False
    return view
