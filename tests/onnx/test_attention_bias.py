"""Attention biases in ONNX Runtime's attention with soft caps, windows and ALiBi; the oracle is NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.oracle.families import family_model
from slm_core.protocols import Context
from slm_core.types import Capability, ContextOptions, KvType, ModelOptions, Pos
from slm_native.backend import NativeBackend

SIZES = ContextOptions(n_ctx=100, n_seq_max=3, n_batch=64, kv_type_k=KvType.F32, kv_type_v=KvType.F32)
BIAS = np.float32([2, -np.inf, 0, -1, 500, 0.5])
TOKENS = np.random.default_rng(0).integers(0, 250, 40).tolist()


def program(context: Context) -> NDArray[np.float32]:
    """Logits of two sequences in turn: the second has rows with biases, which a fork and a cut share and move."""
    assert Capability.ATTENTION_BIAS in context.capabilities
    rows = np.random.default_rng(1).normal(0, 1, (len(BIAS), context.n_embd)).astype(np.float32)
    batch = context.new_batch()
    batch.extend(TOKENS[:20], Pos(0, 0), logits="all")
    batch.extend(TOKENS[:3], Pos(1, 0), logits="all")
    batch.add_embeddings(rows, Pos(1, 3), bias=BIAS, logits="all")
    batch.extend(TOKENS[3:8], Pos(1, 9), logits="all")
    logits = [context.decode(batch).copy()]
    context.fork(1, 2, 8)
    context.cut(Pos(1, 1), Pos(1, 4))
    context.drop(0)
    for _ in range(12):  # cells of the dropped sequence are used again
        batch.clear()
        for seq_id in (2, 0, 1):
            start = context.length(seq_id)
            batch.extend(TOKENS[start : start + 1 + (seq_id == 0)], Pos(seq_id, start), logits="last")
        logits.append(context.decode(batch).copy())
    return np.concatenate(logits)


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("family", ["gemma2", "bloom", "falcon"])
def test_rows_with_biases(family: str, buckets: bool, tmp_path: Path, load: Any, assert_close: Any) -> None:
    path = family_model(tmp_path, family)
    options = ModelOptions(backend_options={"tier": "reference"})
    with NativeBackend().load(path, options) as model, model.new_context(SIZES) as context:
        expected = program(context)
    assert_close(program(load(path, buckets=buckets).new_context(SIZES)), expected, 1e-4)  # clause 9: float32
