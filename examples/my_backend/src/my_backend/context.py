"""The KV cache of this engine. ``ContextBase`` implements the rest of the contract."""

from __future__ import annotations

import math

import numpy as np

from my_backend.engine import Array, Qwen3
from slm_core.context import ContextBase, check_logits
from slm_core.errors import DecodeFailed, InvalidSnapshot
from slm_core.protocols import Batch
from slm_core.types import Capability, ContextOptions, EditLevel, Logits


class MyContext(ContextBase):
    """One array per sequence, [2, L, S, K, D]. Arrays are replaced, never written to.

    Args:
        engine: the forward pass.
        fingerprint: of the model, for dumps.
        options: the sizes.
    """

    def __init__(self, engine: Qwen3, fingerprint: str, options: ContextOptions) -> None:
        super().__init__(
            options,
            backend="mine",
            fingerprint=fingerprint,
            n_vocab=engine.config.n_vocab,
            edit_level=EditLevel.CUT,
            capabilities=frozenset({Capability.KV_PAYLOAD}),  # a fork that grows copies its prefix: not SHARED_FORK
            payload_format="mine-unrotated-f32-1",
        )
        self._engine = engine
        self._caches: list[Array] = [engine.empty() for _ in range(options.n_seq_max)]

    def _engine_decode(self, batch: Batch) -> Logits:
        rows = np.empty((int(batch.logits_mask.sum()), self._engine.config.n_vocab), np.float32)
        row_of = np.cumsum(batch.logits_mask) - 1  # the row of each token that the mask selects
        grown: dict[int, Array] = {}
        try:
            for seq_id in np.unique(batch.seq_ids).tolist():
                indices = np.flatnonzero(batch.seq_ids == seq_id)
                mask = batch.logits_mask[indices]
                logits, grown[seq_id] = self._engine.forward(batch.tokens[indices], mask, self._caches[seq_id])
                rows[row_of[indices[mask]]] = logits
        except MemoryError as error:
            raise DecodeFailed(f"no memory for a batch of {len(batch.tokens)} tokens: {error}") from error
        check_logits(rows)
        for seq_id, cache in grown.items():  # last, so that an error above has changed nothing
            self._caches[seq_id] = cache
        return rows

    def _engine_fork(self, src: int, dst: int, end: int) -> None:
        self._caches[dst] = self._caches[src][:, :, :end]

    def _engine_truncate(self, seq_id: int, length: int) -> None:
        self._caches[seq_id] = self._caches[seq_id][:, :, :length]

    def _engine_cut(self, seq_id: int, start: int, end: int) -> None:
        self._caches[seq_id] = np.delete(self._caches[seq_id], np.s_[start:end], axis=2)  # cached keys are not rotated

    def _engine_drop(self, seq_id: int) -> None:
        self._caches[seq_id] = self._engine.empty()

    def _engine_export(self, seq_id: int) -> bytes:
        return self._caches[seq_id].tobytes()

    def _engine_check_payload(self, n_tokens: int, payload: bytes) -> None:
        n_bytes = 4 * math.prod(self._shape(n_tokens))  # a checksum finds damage, not malice: check before use
        if len(payload) != n_bytes or not (np.abs(np.frombuffer(payload, np.float32)) <= 1e12).all():
            raise InvalidSnapshot(f"a payload of {len(payload)} bytes is not that of {n_tokens} tokens")

    def _engine_import(self, seq_id: int, n_tokens: int, payload: bytes) -> None:
        self._caches[seq_id] = np.frombuffer(payload, np.float32).reshape(self._shape(n_tokens))

    def _shape(self, n_tokens: int) -> tuple[int, ...]:
        n_kinds, n_layers, _, n_heads, head_dim = self._engine.empty().shape
        return n_kinds, n_layers, n_tokens, n_heads, head_dim

    def _engine_close(self) -> None:
        self._caches = []
