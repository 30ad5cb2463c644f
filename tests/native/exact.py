"""Context options with a KV cache in float32."""

from __future__ import annotations

from slm_core.types import ContextOptions, KvType


def exact(**sizes: int) -> ContextOptions:
    """Options with keys and values in float32, on every tier: for tolerances that allow no rounding of the KV cache."""
    return ContextOptions(**sizes, kv_type_k=KvType.F32, kv_type_v=KvType.F32)
