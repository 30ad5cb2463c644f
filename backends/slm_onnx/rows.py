"""A context for an exported graph: each sequence has its own caches and is decoded alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.container import Pieces
from slm_core.context import ContextBase, check_context_options, check_logits
from slm_core.errors import DecodeFailed, InvalidOption
from slm_core.protocols import Batch
from slm_core.types import Capability, ContextOptions, EditLevel, Logits
from slm_onnx import BACKEND
from slm_onnx.celltransfer import packed, unpacked
from slm_onnx.devicelock import on_device
from slm_onnx.providers import KV_TYPES, Device
from slm_onnx.rotation import Rotation
from slm_onnx.steps import Caches, Step

_PAYLOAD_VERSION = 1
_MOST_LOGITS = 64 << 20  # bytes of logits per run: exported graphs return the logits of all tokens
_LEAST_ROOM = 256  # smallest number of cells of caches that are written in place


@dataclass(frozen=True, slots=True, eq=False)
class RowsEngine:
    """The state that all contexts of a directory's model share.

    Attributes:
        first: the graph for the first tokens of a sequence; equal to ``further`` if one graph does both.
        further: the graph for later tokens.
        shape: planes (keys and values of each layer), heads K, width D.
        n_vocab: vocabulary size V.
        n_ctx: the model's longest context; None if unknown.
        in_place: whether caches are written in place.
        rotation: rotates keys; None if keys cannot be moved.
        edit_level: edit level of contexts.
        device: device of the graphs.
        fingerprint: fingerprint of the model.
        digest: key for the content of the directory.
        most_rows: most tokens of one run; None for any number.
    """

    first: Step
    further: Step
    shape: tuple[int, int, int]
    n_vocab: int
    n_ctx: int | None
    in_place: bool
    rotation: Rotation | None
    edit_level: EditLevel
    device: Device
    fingerprint: str
    digest: str
    most_rows: int | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the caches."""
        return self.further.dtype

    def with_edits(self, level: EditLevel, rotation: Rotation | None) -> RowsEngine:
        """The same engine with an edit level and a rotation."""
        return replace(self, edit_level=level, rotation=rotation)

    def empty(self, n_cells: int) -> Caches:
        """Caches of zeros: uninitialized memory may contain NaN."""
        n_planes, n_heads, width = self.shape
        return [self.device.zeros((1, n_heads, n_cells, width), self.dtype) for _ in range(n_planes)]


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A sequence of ``length`` tokens, and its caches, which may have room for more tokens."""

    length: int = 0
    caches: Caches = field(default_factory=tuple)


class RowsContext(ContextBase):
    """Sequences with separate caches.

    Args:
        engine: the shared state of the model.
        options: the sizes, and the KV type, which must be the graph's.

    Raises:
        InvalidOption: a size that no context can have, or another KV type.
    """

    def __init__(self, engine: RowsEngine, options: ContextOptions) -> None:
        check_context_options(options)
        kv_type = KV_TYPES[engine.dtype.name]
        for option in (options.kv_type_k, options.kv_type_v):
            if option is not None and option != kv_type:
                raise InvalidOption(f"unknown KV type {str(option)!r} of this model (accepted: {kv_type}, the graph's)")
        self._engine: RowsEngine = engine
        self._device_lock = engine.device.provider.lock
        self._rows = [_Row()] * options.n_seq_max
        super().__init__(
            options,
            backend=BACKEND,
            fingerprint=engine.fingerprint,
            n_vocab=engine.n_vocab,
            edit_level=engine.edit_level,
            capabilities=frozenset({Capability.KV_PAYLOAD}),
            payload_format=f"rows {_PAYLOAD_VERSION};{kv_type};{engine.digest}",
        )

    @on_device
    def _engine_decode(self, batch: Batch) -> Logits:
        tokens, seq_ids, mask = batch.tokens, batch.seq_ids, batch.logits_mask
        rows = np.empty((int(np.count_nonzero(mask)), self._engine.n_vocab), np.float32)
        row_of = np.cumsum(mask) - 1  # the row of each token with logits
        after = {}
        for seq_id in dict.fromkeys(seq_ids.tolist()):
            indices = np.flatnonzero(seq_ids == seq_id)
            after[seq_id], logits = self._run(self._rows[seq_id], tokens[indices], mask[indices])
            rows[row_of[indices[mask[indices]]]] = logits
        check_logits(rows)
        for seq_id, row in after.items():  # only if all sequences ran
            self._rows[seq_id] = row
        return rows

    def _run(self, row: _Row, tokens: NDArray[np.int32], mask: NDArray[np.bool_]) -> tuple[_Row, Logits]:
        """Append tokens to a sequence; returns the logits of the tokens that the mask selects."""
        engine, parts = self._engine, [np.empty((0, self._engine.n_vocab), np.float32)]
        end = row.length + len(tokens)
        if engine.n_ctx is not None and end > engine.n_ctx:
            raise DecodeFailed(f"position {end - 1} is outside the {engine.n_ctx} that the model is made for")
        row = self._with_room(row, end)
        while len(tokens):
            step = engine.further if row.length else engine.first
            n = 1 if step.one_by_one else max(1, _MOST_LOGITS // (4 * engine.n_vocab))
            n = min(n, engine.most_rows or n)
            logits, caches = step.run(tokens[:n], row.caches, row.length, in_place=engine.in_place, position=row.length)
            parts.append(logits[mask[:n]])
            row = _Row(row.length + len(tokens[:n]), caches)
            tokens, mask = tokens[n:], mask[n:]
        return row, np.concatenate(parts)

    def _with_room(self, row: _Row, n: int) -> _Row:
        """The same sequence, with room for ``n`` tokens in caches that are written in place."""
        engine = self._engine
        if not engine.in_place:
            return row if row.caches else _Row(0, engine.empty(0))
        if row.caches and n <= row.caches[0].shape()[2]:
            return row
        return self._placed(_arrays(row), max(n, min(max(2 * n, _LEAST_ROOM), self.n_ctx)))

    def _placed(self, planes: Sequence[NDArray[Any]], n_cells: int) -> _Row:
        """A sequence of planes [K, n, D]; caches that are written in place have ``n_cells`` cells."""
        engine = self._engine
        n_planes, n_heads, width = engine.shape
        length = planes[0].shape[1] if planes else 0
        caches = []
        for i in range(n_planes):
            array = np.zeros((1, n_heads, n_cells if engine.in_place else length, width), engine.dtype)
            if planes:
                array[0, :, :length] = planes[i]
            caches.append(engine.device.place(array))
        return _Row(length, caches)

    @on_device
    def _engine_fork(self, src: int, dst: int, end: int) -> None:
        planes = [plane[:, :end] for plane in _arrays(self._rows[src])]
        self._rows[dst] = self._placed(planes, min(max(2 * end, _LEAST_ROOM), self.n_ctx))

    @on_device
    def _engine_truncate(self, seq_id: int, length: int) -> None:
        row = self._rows[seq_id]
        if self._engine.in_place:
            self._rows[seq_id] = replace(row, length=length)
        else:
            self._rows[seq_id] = self._placed([plane[:, :length] for plane in _arrays(row)], length)

    @on_device
    def _engine_cut(self, seq_id: int, start: int, end: int) -> None:
        rotation = self._engine.rotation
        assert rotation is not None, "the edit level says so"
        planes = []
        for i, plane in enumerate(_arrays(self._rows[seq_id])):
            is_key, tail = i % 2 == 0, plane[:, end:]
            moved = rotation.rotate(tail, start - end) if is_key else tail
            planes.append(np.concatenate([plane[:, :start], moved], axis=1))
        self._rows[seq_id] = self._placed(planes, self._rows[seq_id].caches[0].shape()[2])

    @on_device
    def _engine_drop(self, seq_id: int) -> None:
        self._rows[seq_id] = _Row()

    def _engine_export(self, seq_id: int) -> Pieces:
        row, (_, n_heads, width) = self._rows[seq_id], self._engine.shape
        n_bytes = len(row.caches) * n_heads * row.length * width * self._engine.dtype.itemsize
        return Pieces(n_bytes, (self._piece(cache, row.length) for cache in row.caches))

    @on_device
    def _piece(self, cache: Any, length: int) -> bytes:
        return packed([cache.numpy()[0, :, :length]])

    def _engine_check_payload(self, n_tokens: int, payload: bytes) -> None:
        self._parsed(n_tokens, payload)

    @on_device
    def _engine_import(self, seq_id: int, n_tokens: int, payload: bytes) -> None:
        room = min(max(2 * n_tokens, _LEAST_ROOM), self.n_ctx)
        self._rows[seq_id] = self._placed(self._parsed(n_tokens, payload), room)

    def _parsed(self, n_tokens: int, payload: bytes) -> Sequence[NDArray[Any]]:
        n_planes, n_heads, width = self._engine.shape
        return unpacked(payload, [(n_heads, n_tokens, width)] * n_planes, [self._engine.dtype] * n_planes)

    @on_device
    def _engine_close(self) -> None:
        del self._rows, self._engine


def _arrays(row: _Row) -> list[NDArray[Any]]:
    """The planes of a sequence, [K, length, D] each."""
    return [cache.numpy()[0, :, : row.length] for cache in row.caches]
