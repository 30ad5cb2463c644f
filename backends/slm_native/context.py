"""A context of the native engine: the paged KV cache under the bookkeeping that all backends share."""

from __future__ import annotations

from slm_core.contextbase import ContextBase, check_context_options
from slm_core.errors import DecodeFailed, InvalidPosition
from slm_core.protocols import Batch
from slm_core.types import Capability, ContextOptions, EditLevel, Logits
from slm_native.kv import PagedKvCache, PageLayout, codec_of
from slm_native.transformer import Transformer

BACKEND = "native"
_PAYLOAD_VERSION = 1


class NativeContext(ContextBase):
    """Several token histories in one paged KV cache.

    A fork shares pages until one side writes on them. A cut keeps values bit for bit; keys are rotated in float32, so
    those in f16 and q8_0 are rounded once more by each cut that moves them.

    Args:
        transformer: the model.
        options: the sizes, and the KV types (any; what the kernels prefer unless given).
        fingerprint: of the model.

    Raises:
        InvalidOption: a size below 1, more memory than there is, or a KV type that is unknown or does not fit.
    """

    def __init__(self, transformer: Transformer, options: ContextOptions, fingerprint: str) -> None:
        check_context_options(options)
        spec = transformer.spec
        keys, values = (
            codec_of(transformer.kv_type if kv_type is None else kv_type, spec.head_dim)
            for kv_type in (options.kv_type_k, options.kv_type_v)
        )
        layout = PageLayout(spec.n_layers, spec.n_kv_heads, spec.head_dim, keys, values)
        # Refuses what no memory could hold.
        self._cache = PagedKvCache(layout, options.n_ctx, options.n_seq_max, transformer.new_pages)
        self._transformer = transformer
        self._positions = transformer.positions(options.n_ctx)
        super().__init__(
            options,
            backend=BACKEND,
            fingerprint=fingerprint,
            n_vocab=spec.n_vocab,
            edit_level=EditLevel.CUT if spec.is_shiftable else EditLevel.TRUNCATE,
            capabilities=frozenset({Capability.SHARED_FORK, Capability.KV_PAYLOAD}),
            payload_format=f"{_PAYLOAD_VERSION};k={keys.kv_type};v={values.kv_type};"
            f"L={spec.n_layers};K={spec.n_kv_heads};D={spec.head_dim}"
            + (f";rope={self._positions.kind}" if self._positions.kind else ""),
        )

    def _engine_decode(self, batch: Batch) -> Logits:
        n_positions = self._transformer.spec.n_positions
        if n_positions is not None and (last := int(batch.positions.max(initial=0))) >= n_positions:
            raise InvalidPosition(f"position {last}: this model has learned positions 0 to {n_positions - 1}")
        plan = self._cache.plan(batch.seq_ids, batch.positions)
        try:
            logits = self._transformer.forward(
                batch.tokens, batch.positions, batch.wants_logits, plan, self._cache.layers, self._positions
            )
        except self._transformer.failures as error:
            raise DecodeFailed(f"the device failed on a batch of {len(batch)} tokens: {error}") from error
        self._cache.commit(plan)
        return logits

    def _engine_fork(self, src: int, dst: int, end: int) -> None:
        self._cache.fork(src, dst, end)

    def _engine_truncate(self, seq_id: int, length: int) -> None:
        self._cache.truncate(seq_id, length)

    def _engine_cut(self, seq_id: int, start: int, end: int) -> None:
        self._cache.cut(seq_id, start, end, self._ledger.length(seq_id), self._positions.move_keys)

    def _engine_drop(self, seq_id: int) -> None:
        self._cache.drop(seq_id)

    def _engine_export(self, seq_id: int) -> bytes:
        return self._cache.export(seq_id, self._ledger.length(seq_id))

    def _engine_import(self, seq_id: int, n_tokens: int, payload: bytes) -> None:
        self._cache.load(seq_id, n_tokens, payload)

    def _engine_close(self) -> None:
        # The base lets no call through any more. The last references: pages and weights are freed here and now.
        del self._cache, self._transformer, self._positions
