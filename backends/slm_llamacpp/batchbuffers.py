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
"""From tokens [T] to the rows [T, E] that stand for them."""


class Part(NamedTuple):
    """Tokens of a batch one after another, or embedding rows: llama.cpp does not take both together.

    Attributes:
        tokens: ids [T].
        seq_ids: the sequence of each [T].
        positions: of each [T]; of rows in a grid, or among such, [T, 3].
        wants_rows: whether results are wanted for each [T].
        rows: in place of all tokens [T, E], or None.
        is_span: whether they see each other both ways.
    """

    tokens: NDArray[np.int32]
    seq_ids: NDArray[np.int32]
    positions: NDArray[np.integer]
    wants_rows: NDArray[np.bool_]
    rows: NDArray[np.float32] | None
    is_span: bool = False


def parts_of_a_kind(
    batch: Batch, positions: NDArray[np.integer], wants_rows: NDArray[np.bool_], table_rows: TableRows
) -> Iterator[Part]:
    """The parts of a batch, in order; a span is one, whatever is in it.

    Args:
        batch: the batch.
        positions: that llama.cpp is given [T]; [T, 3], in time, height and width, where rows stand apart.
        wants_rows: which results are wanted [T].
        table_rows: gives embedding rows that stand for tokens, where rows and tokens make one span.
    """
    tokens, seq_ids, rows = batch.tokens, batch.seq_ids, batch.embeddings
    if not len(rows) and not batch.ahead.any():
        yield Part(tokens, seq_ids, positions, wants_rows, None)
        return
    is_row, n_given = tokens == EMBEDDED, np.cumsum(tokens == EMBEDDED)
    for places, is_span in _runs(is_row, batch.ahead):
        given = None
        if is_row[places].any():
            given = rows[n_given[places[0]] - is_row[places[0]] : n_given[places[-1]]]
            if not is_row[places].all():
                given = table_rows(np.maximum(tokens[places], 0))
                given[is_row[places]] = rows[n_given[places[0]] - is_row[places[0]] : n_given[places[-1]]]
        yield Part(tokens[places], seq_ids[places], positions[places], wants_rows[places], given, is_span)


def _runs(is_row: NDArray[np.bool_], ahead: NDArray[np.int32]) -> Iterator[tuple[NDArray[np.intp], bool]]:
    """Spans, and what is between them: rows, or tokens."""
    first = 0
    while first < len(is_row):
        end = first + int(ahead[first]) + 1
        is_span = end > first + 1
        while not is_span and end < len(is_row) and is_row[end] == is_row[first] and not ahead[end]:
            end += 1
        yield np.arange(first, end), is_span
        first = end


class BatchBuffers:
    """One ``llama_batch``, reused by every decode.

    Args:
        api: the low-level functions.
        capacity: tokens that fit.
        seq_ids: for each sequence, the ids that llama.cpp knows it by, int32 [n_sequences, n_ids].
        n_axes: positions that it wants for each embedding row: more than one for multi-dimensional positions.
    """

    def __init__(self, api: Any, capacity: int, seq_ids: NDArray[np.int32], n_axes: int = 1) -> None:
        self._n_axes = n_axes
        self._rows = np.zeros((0, 0), np.float32)
        self._seq_ids = np.ascontiguousarray(seq_ids)
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(n_axes * capacity, np.int32)
        self._n_ids = np.full(capacity, seq_ids.shape[1], np.int32)
        self._id_addresses = np.zeros(capacity, np.uintp)
        self._wants_logits = np.zeros(capacity, np.int8)
        self._batch = api.llama_batch()
        self._batch.pos = self._positions.ctypes.data_as(_INT32S)
        self._batch.n_seq_id = self._n_ids.ctypes.data_as(_INT32S)
        self._batch.seq_id = self._id_addresses.ctypes.data_as(ctypes.POINTER(_INT32S))
        self._batch.logits = self._wants_logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    def fill(
        self,
        tokens: NDArray[np.int32],
        seq_ids: NDArray[np.int32],
        positions: NDArray[np.integer],
        wants_logits: NDArray[np.bool_],
        rows: NDArray[np.float32] | None = None,
    ) -> Any:
        """The ``llama_batch`` with these tokens, or with ``rows`` [T, E] in place of all of them.

        Arrays have one length [T], and are valid until the next call.
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
        self._wants_logits[:n] = wants_logits
        self._id_addresses[:n] = self._seq_ids.ctypes.data + seq_ids.astype(np.uintp) * self._seq_ids.strides[0]
        self._batch.n_tokens = n
        return self._batch

    def _on_axes(self, positions: NDArray[np.integer]) -> NDArray[np.integer]:
        """Axis by axis, and 0 on the last of several; a text's tokens have the same on the others."""
        if self._n_axes == 1:
            return positions
        axes = [positions] * (self._n_axes - 1) if positions.ndim == 1 else list(positions.T)
        return np.concatenate([*axes, np.zeros(len(positions), np.int32)])
