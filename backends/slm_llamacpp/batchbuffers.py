"""A ``llama_batch`` whose arrays are NumPy's, filled without a loop."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray


class BatchBuffers:
    """One ``llama_batch``, reused by every decode.

    Args:
        api: the low-level functions.
        capacity: tokens that fit.
        seq_ids: for each sequence, the ids that llama.cpp knows it by, int32 [n_sequences, n_ids].
    """

    def __init__(self, api: Any, capacity: int, seq_ids: NDArray[np.int32]) -> None:
        self._seq_ids = np.ascontiguousarray(seq_ids)
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._n_ids = np.full(capacity, seq_ids.shape[1], np.int32)
        self._id_addresses = np.zeros(capacity, np.uintp)
        self._wants_logits = np.zeros(capacity, np.int8)
        int32s, int8s = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int8)
        self._batch = api.llama_batch()
        self._batch.token = self._tokens.ctypes.data_as(int32s)
        self._batch.pos = self._positions.ctypes.data_as(int32s)
        self._batch.n_seq_id = self._n_ids.ctypes.data_as(int32s)
        self._batch.seq_id = self._id_addresses.ctypes.data_as(ctypes.POINTER(int32s))
        self._batch.logits = self._wants_logits.ctypes.data_as(int8s)

    def fill(
        self,
        tokens: NDArray[np.int32],
        seq_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        wants_logits: NDArray[np.bool_],
    ) -> Any:
        """The ``llama_batch`` with these tokens; arrays of one length [T], valid until the next call."""
        n = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = positions
        self._wants_logits[:n] = wants_logits
        self._id_addresses[:n] = self._seq_ids.ctypes.data + seq_ids.astype(np.uintp) * self._seq_ids.strides[0]
        self._batch.n_tokens = n
        return self._batch
