"""Checks dumped cells before llama.cpp loads them: it trusts positions, and never checks numbers.

The layout equals ``llama_kv_cache::state_write`` for one sequence: a header, the position of each cell, the keys of
each layer, the values of each layer. Numbers are checked because attention reads the cells of all sequences and masks
afterwards: one NaN would spread to other sequences.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from slm_core.container import check_numbers
from slm_core.errors import InvalidSnapshot
from slm_core.types import KvType

GGML_TYPES = {KvType.F32: 0, KvType.F16: 1, KvType.Q4_0: 2, KvType.Q5_0: 6, KvType.Q8_0: 8, KvType.BF16: 30}
BYTES_PER_NUMBER = {
    KvType.F32: 4.0,
    KvType.F16: 2.0,
    KvType.BF16: 2.0,
    KvType.Q8_0: 34 / 32,
    KvType.Q5_0: 22 / 32,
    KvType.Q4_0: 18 / 32,
}
_MAGIC = 0xAF143CD8
_HEADER = struct.Struct("<IiII")  # magic, seq_id, streams, cells
_CELL = np.dtype([("position", "<i4"), ("n_seq_ids", "<u4"), ("seq_id", "<i4")])
_LAYERS = struct.Struct("<II")  # whether values are transposed, layers
_ROWS = struct.Struct("<iQ")  # type, bytes of a row
_COLUMNS = struct.Struct("<iII")  # type, bytes of a number, width
_MAX_LAYERS = 4096
_BLOCK_BYTES = {KvType.Q8_0: 34, KvType.Q5_0: 22, KvType.Q4_0: 18}  # each begins with its float16 scale


def check_payload(payload: bytes, n_tokens: int, type_k: KvType, type_v: KvType, start: int = 0) -> None:
    """Raise unless a payload is a dump of ``n_tokens`` cells of one sequence, from position ``start`` on.

    Raises:
        InvalidSnapshot: it is not; the message has the place of the difference.
    """
    reader = _Reader(payload)
    magic, _, n_streams, n_cells = reader.unpack(_HEADER)
    if (magic, n_streams, n_cells) != (_MAGIC, 1, n_tokens):
        raise InvalidSnapshot(
            f"the dump's KV payload holds {n_cells} cells in {n_streams} streams for {n_tokens} tokens"
        )
    cells = np.frombuffer(reader.take(n_cells * _CELL.itemsize), _CELL)
    if (
        not np.array_equal(np.sort(cells["position"]), np.arange(start, start + n_tokens))
        or (cells["n_seq_ids"] != 1).any()
    ):
        raise InvalidSnapshot(f"the positions of the dump's KV payload are not {start} to {start + n_tokens - 1}")
    transposed, n_layers = reader.unpack(_LAYERS)
    if transposed > 1 or not 1 <= n_layers <= _MAX_LAYERS:
        raise InvalidSnapshot(f"the dump's KV payload has {n_layers} layers")
    for _ in range(n_layers):
        _check_rows(reader, n_cells, type_k)
    while reader.left and n_layers:  # some models have no separate values
        n_layers -= 1
        (_check_columns if transposed else _check_rows)(reader, n_cells, type_v)
    if reader.left:
        raise InvalidSnapshot(f"the dump's KV payload has {reader.left} bytes too many")


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, n: int) -> memoryview:
        if n > self.left:
            raise InvalidSnapshot("the dump's KV payload ends early")
        self._at += n
        return self._data[self._at - n : self._at]

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))


def _check_rows(reader: _Reader, n_cells: int, kind: KvType) -> None:
    type_id, row_bytes = reader.unpack(_ROWS)
    _check_numbers(reader.take(n_cells * row_bytes), type_id, kind)


def _check_columns(reader: _Reader, n_cells: int, kind: KvType) -> None:
    type_id, number_bytes, width = reader.unpack(_COLUMNS)
    _check_numbers(reader.take(n_cells * number_bytes * width), type_id, kind)


def _check_numbers(data: memoryview, type_id: int, kind: KvType) -> None:
    if type_id != GGML_TYPES[kind]:
        raise InvalidSnapshot(f"the dump's KV payload is of type {type_id}, not of type {GGML_TYPES[kind]} ({kind})")
    unit = _BLOCK_BYTES.get(kind, 4 if kind is KvType.F32 else 2)
    if len(data) == 0 or len(data) % unit:
        raise InvalidSnapshot(f"the dump's KV payload has {len(data)} bytes of {kind}, in units of {unit}")
    check_numbers(_scales(data, kind), "the dump's KV payload")


def _scales(data: memoryview, kind: KvType) -> NDArray[np.float16] | NDArray[np.float32]:
    """The numbers of a float type, or the scales of a quantized type, which bound its numbers."""
    if kind is KvType.F32:
        return np.frombuffer(data, "<f4")
    if kind is KvType.BF16:
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if kind is KvType.F16:
        return np.frombuffer(data, "<f2")
    return np.frombuffer(data, np.uint8).reshape(-1, _BLOCK_BYTES[kind])[:, :2].copy().view("<f2")
