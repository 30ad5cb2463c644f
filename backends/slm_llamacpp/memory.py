"""llama.cpp's KV cache: the sequences of a context, and the edits that it supports.

The kind of llama.cpp's memory determines the edit level of a model:

- one attention cache: all edits; cuts only if keys can be re-rotated;
- an attention cache and a second one for windows: truncation only. The cache is as large as the context, but llama.cpp
  reuses cells that the window has passed unless two sequences hold them. So every sequence has a twin that holds the
  same cells;
- recurrent states, or anything else: no edits.
"""

from __future__ import annotations

import ctypes
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import DecodeFailed
from slm_core.types import Capability, EditLevel

Cells: TypeAlias = "ctypes.Array[ctypes.c_uint8]"
"""Dumped cells in llama.cpp's layout."""
_NO_FLAGS = 0
_TO_END = -1
_STATE_HEADER_BYTES, _CACHE_HEADER_BYTES = 8, 8  # in the dump of an empty sequence: one header, and one per cache
_MULTI_ROPE = (8, 40)  # llama_rope_type
_ROPE_AXES = 4


class CacheKind(Enum):
    """The kind of llama.cpp's memory for a model."""

    ATTENTION = "one attention cache"
    WINDOWED = "an attention cache with a sliding window"
    OTHER = "recurrent state, or several caches"


class Memory:
    """The sequences of one context, by the contract's ids. ``scratch`` is an extra sequence, empty between calls.

    Args:
        api: the low-level functions.
        context: llama.cpp's pointer to the context.
        model: llama.cpp's pointer to the model.
        n_seq_max: number of sequences.
    """

    def __init__(self, api: Any, context: int, model: int, n_seq_max: int) -> None:
        self._api = api
        self._context = context
        self._memory: int = api.llama_get_memory(context)
        self._n_seq_max = n_seq_max
        self.scratch = n_seq_max
        self.kind = self._kind(model)
        self._can_shift = bool(api.llama_memory_can_shift(self._memory))
        self._is_multi_rope = api.llama_model_rope_type(model) in _MULTI_ROPE

    @property
    def n_axes(self) -> int:
        """The number of positions of each embedding row in llama.cpp."""
        return _ROPE_AXES if self._is_multi_rope else 1

    def edit_level(self, *, can_rotate: bool) -> EditLevel:
        """The highest edit; ``can_rotate`` says whether keys of the context's type can be re-rotated."""
        if self.kind is CacheKind.OTHER:
            return EditLevel.REPLAY
        can_cut = self.kind is CacheKind.ATTENTION and self._can_shift and can_rotate
        return EditLevel.CUT if can_cut else EditLevel.TRUNCATE

    def capabilities(self) -> frozenset[Capability]:
        """The optional capabilities.

        No KV payload if the cache has windows (dumps lack cells that the window has passed) or M-RoPE positions (dumps
        contain more than this backend checks). Such dumps contain tokens only.
        """
        if self.kind is CacheKind.ATTENTION and not self._is_multi_rope:
            return frozenset({Capability.SHARED_FORK, Capability.KV_PAYLOAD})
        return frozenset({Capability.SHARED_FORK})

    def _kind(self, model: int) -> CacheKind:
        if is_recurrent(self._api, model):
            return CacheKind.OTHER
        n_bytes = self._api.llama_state_seq_get_size_ext(self._context, 0, _NO_FLAGS)
        n_caches, rest = divmod(n_bytes - _STATE_HEADER_BYTES, _CACHE_HEADER_BYTES)
        if (n_caches, rest) == (1, 0):
            return CacheKind.ATTENTION
        has_window = self._api.llama_model_n_swa(model) > 0
        return CacheKind.WINDOWED if has_window and (n_caches, rest) == (2, 0) else CacheKind.OTHER

    def ids(self) -> NDArray[np.int32]:
        """llama.cpp's ids of each sequence, int32 [n_sequences, 1 or 2]."""
        ids = np.arange(self._n_seq_max + 1, dtype=np.int32)
        if self.kind is CacheKind.WINDOWED:
            return np.stack([ids, ids + self._n_seq_max], axis=1)[:-1]
        return ids[:, None]

    def length(self, seq_id: int) -> int:
        """The number of positions that a sequence holds in llama.cpp."""
        return int(self._api.llama_memory_seq_pos_max(self._memory, seq_id)) + 1

    def remove(self, seq_id: int, start: int, end: int = _TO_END) -> None:
        """Remove [start, end) from a sequence.

        Raises:
            DecodeFailed: llama.cpp refused; nothing has changed.
        """
        for i in self._ids_of(seq_id):
            if not self._api.llama_memory_seq_rm(self._memory, i, start, end):
                raise DecodeFailed(f"llama.cpp refused to forget positions from {start} on of sequence {seq_id}")

    def clear(self) -> None:
        """Empty all sequences, and zero the memory of the cache."""
        self._api.llama_memory_clear(self._memory, True)

    def share(self, src: int, dst: int, end: int, *, start: int = 0) -> None:
        """Let ``dst`` share the cells of ``src[start:end]``."""
        for i in self._ids_of(dst):
            self._api.llama_memory_seq_cp(self._memory, src, i, start, end)

    def move_down(self, seq_id: int, start: int, distance: int) -> None:
        """Lower the positions from ``start`` on; keys are re-rotated at the next decode."""
        self._api.llama_memory_seq_add(self._memory, seq_id, start, _TO_END, -distance)

    def dump(self, seq_id: int) -> Cells:
        """The cells of a sequence (positions, keys and values), copied in one call.

        Raises:
            DecodeFailed: llama.cpp refused.
        """
        size = self._api.llama_state_seq_get_size_ext(self._context, seq_id, _NO_FLAGS)
        data: Cells = (ctypes.c_uint8 * size)()
        written = self._api.llama_state_seq_get_data_ext(self._context, data, size, seq_id, _NO_FLAGS)
        if not size or written != size:
            raise DecodeFailed(f"llama.cpp did not dump sequence {seq_id}")
        return data

    def load(self, seq_id: int, data: bytes | Cells) -> bool:
        """Fill an empty sequence with dumped cells; False if llama.cpp refuses, and the sequence stays empty."""
        pointed = ctypes.c_char_p(data) if isinstance(data, bytes) else data
        source = ctypes.cast(pointed, ctypes.POINTER(ctypes.c_uint8))
        read = self._api.llama_state_seq_set_data_ext(self._context, source, len(data), seq_id, _NO_FLAGS)
        if read == len(data):
            return True
        self.remove(seq_id, 0)
        return False

    def _ids_of(self, seq_id: int) -> tuple[int, ...]:
        return (seq_id, seq_id + self._n_seq_max) if self.kind is CacheKind.WINDOWED else (seq_id,)


def is_recurrent(api: Any, model: int) -> bool:
    """Whether the model is recurrent or hybrid: some layers keep a state instead of keys and values."""
    return bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))


def has_mrope(api: Any, model: int) -> bool:
    """Whether the model's embedding rows may have M-RoPE positions."""
    is_plain = not is_recurrent(api, model) and api.llama_model_n_swa(model) <= 0
    return is_plain and api.llama_model_rope_type(model) in _MULTI_ROPE


def n_llama_sequences(api: Any, model: int, n_seq_max: int) -> int:
    """The number of sequences in llama.cpp that ``Memory`` needs for ``n_seq_max``."""
    if is_recurrent(api, model):
        return n_seq_max  # each extra one would take the memory of a state
    return 2 * n_seq_max if api.llama_model_n_swa(model) > 0 else n_seq_max + 1
