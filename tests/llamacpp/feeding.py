"""Helpers that decode tokens and compare logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slm_core.protocols import BackendModel, Context
from slm_core.types import ContextOptions, KvType, Pos


def new_context(model: BackendModel, *, n_ctx: int = 256, n_seq_max: int = 3, kv_type: KvType = KvType.F32) -> Context:
    options = ContextOptions(n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=64, kv_type_k=kv_type, kv_type_v=kv_type)
    return model.new_context(options)


def feed(context: Context, tokens: Sequence[int], seq_id: int = 0) -> NDArray[np.float32]:
    """Append tokens; the logits after each, float32 [T, V]."""
    batch = context.new_batch()
    rows = []
    for first in range(0, len(tokens), context.n_batch):
        batch.clear()
        batch.extend(tokens[first : first + context.n_batch], Pos(seq_id, context.length(seq_id)), logits="all")
        rows.append(context.decode(batch))
    return np.concatenate(rows)


def some_tokens(n: int, seed: int = 0, n_vocab: int = 256) -> list[int]:
    return list(np.random.default_rng(seed).integers(0, n_vocab, n).tolist())


def error(rows: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    """The largest relative error of a row (contract, clause 9)."""
    difference = np.linalg.norm(rows.astype(np.float64) - expected, axis=-1)
    return float((difference / np.linalg.norm(expected.astype(np.float64), axis=-1)).max())
