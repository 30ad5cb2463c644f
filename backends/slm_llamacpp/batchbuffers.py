"""A ``llama_batch`` whose arrays are NumPy's, filled without a loop."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.protocols import Batch
from slm_core.types import EMBEDDED

_INT32S, _FLOATS = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_float)


TableRows: TypeAlias = Callable[[NDArray[np.int32]], NDArray[np.float32]]
"""Returns the embedding rows [T, E] of tokens [T]."""


class Part(NamedTuple):
    """Consecutive tokens of a batch, or consecutive embedding rows: llama.cpp does not accept both in one batch.

    Attributes:
        tokens: ids [T].
        seq_ids: the sequence of each token [T].
        positions: the position of each token [T]; M-RoPE positions [T, 3].
        output_mask: the tokens whose results are read, bool [T].
        rows: embedding rows in place of all tokens [T, E]; None for tokens.
        is_block: whether the tokens are a bidirectional block.
    """

    tokens: NDArray[np.int32]
    seq_ids: NDArray[np.int32]
    positions: NDArray[np.integer]
    output_mask: NDArray[np.bool_]
    rows: NDArray[np.float32] | None
    is_block: bool = False


def parts_of_a_kind(
    batch: Batch, positions: NDArray[np.integer], output_mask: NDArray[np.bool_], table_rows: TableRows
) -> Iterator[Part]:
    """The parts of a batch, in order. A bidirectional block is one part, even if it mixes tokens and rows.

    Args:
        batch: the batch.
        positions: positions for llama.cpp [T]; M-RoPE positions (time, height, width) are [T, 3].
        output_mask: the tokens whose results are read, bool [T].
        table_rows: embedding rows of tokens, for blocks that mix tokens and rows.
    """
    tokens, seq_ids, rows = batch.tokens, batch.seq_ids, batch.embeddings
    if not len(rows) and not batch.ahead.any():
        yield Part(tokens, seq_ids, positions, output_mask, None)
        return
    is_row, n_rows = tokens == EMBEDDED, np.cumsum(tokens == EMBEDDED)
    for indices, is_block in _runs(is_row, batch.ahead):
        part_rows = None
        if is_row[indices].any():
            part_rows = rows[n_rows[indices[0]] - is_row[indices[0]] : n_rows[indices[-1]]]
            if not is_row[indices].all():
                part_rows = table_rows(np.maximum(tokens[indices], 0))
                part_rows[is_row[indices]] = rows[n_rows[indices[0]] - is_row[indices[0]] : n_rows[indices[-1]]]
        yield Part(tokens[indices], seq_ids[indices], positions[indices], output_mask[indices], part_rows, is_block)


def _runs(is_row: NDArray[np.bool_], ahead: NDArray[np.int32]) -> Iterator[tuple[NDArray[np.intp], bool]]:
    """Indices of each bidirectional block, and of each run of tokens or rows between blocks."""
    first = 0
    while first < len(is_row):
        end = first + int(ahead[first]) + 1
        is_block = end > first + 1
        while not is_block and end < len(is_row) and is_row[end] == is_row[first] and not ahead[end]:
            end += 1
        yield np.arange(first, end), is_block
        first = end


class BatchBuffers:
    """One ``llama_batch`` that every decode reuses.

    Args:
        api: the low-level functions.
        capacity: the largest number of tokens.
        seq_ids: the ids in llama.cpp of each sequence, int32 [n_sequences, n_ids].
        n_axes: positions per embedding row; more than one with M-RoPE.
    """

    def __init__(self, api: Any, capacity: int, seq_ids: NDArray[np.int32], n_axes: int = 1) -> None:
        self._n_axes = n_axes
        self._rows = np.zeros((0, 0), np.float32)
        self._seq_ids = np.ascontiguousarray(seq_ids)
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(n_axes * capacity, np.int32)
        self._n_ids = np.full(capacity, seq_ids.shape[1], np.int32)
        self._id_addresses = np.zeros(capacity, np.uintp)
        self._logits_mask = np.zeros(capacity, np.int8)
        self._batch = api.llama_batch()
        self._batch.pos = self._positions.ctypes.data_as(_INT32S)
        self._batch.n_seq_id = self._n_ids.ctypes.data_as(_INT32S)
        self._batch.seq_id = self._id_addresses.ctypes.data_as(ctypes.POINTER(_INT32S))
        self._batch.logits = self._logits_mask.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    def fill(
        self,
        tokens: NDArray[np.int32],
        seq_ids: NDArray[np.int32],
        positions: NDArray[np.integer],
        logits_mask: NDArray[np.bool_],
        rows: NDArray[np.float32] | None = None,
    ) -> Any:
        """The ``llama_batch`` of these tokens, or of ``rows`` [T, E] in place of all tokens.

        All arrays have the length T. The result is valid until the next call.
        """
        n = len(tokens)
        if rows is None:
            self._tokens[:n] = tokens
            self._batch.token, self._batch.embd = self._tokens.ctypes.data_as(_INT32S), None
            self._positions[:n] = positions if positions.ndim == 1 else positions[:, 0]
        else:
            self._rows = np.ascontiguousarray(rows)
            self._batch.token, self._batch.embd = None, self._rows.ctypes.data_as(_FLOATS)
            self._positions[: self._n_axes * n] = self._on_axes(positions)
        self._logits_mask[:n] = logits_mask
        self._id_addresses[:n] = self._seq_ids.ctypes.data + seq_ids.astype(np.uintp) * self._seq_ids.strides[0]
        self._batch.n_tokens = n
        return self._batch

    def _on_axes(self, positions: NDArray[np.integer]) -> NDArray[np.integer]:
        """Positions axis by axis; the last of several axes is 0. A text token has equal positions on the others."""
        if self._n_axes == 1:
            return positions
        axes = [positions] * (self._n_axes - 1) if positions.ndim == 1 else list(positions.T)
        return np.concatenate([*axes, np.zeros(len(positions), np.int32)])
