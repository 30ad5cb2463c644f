"""Contexts whose keys and values are not rounded."""

from __future__ import annotations

from slm_core.types import ContextOptions, KvType


def exact(**sizes: int) -> ContextOptions:
    """Options with keys and values in float32, on every tier: for bounds that leave no room for their rounding."""
    return ContextOptions(**sizes, kv_type_k=KvType.F32, kv_type_v=KvType.F32)
