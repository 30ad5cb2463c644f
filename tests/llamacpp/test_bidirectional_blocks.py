"""Bidirectional blocks with sliding windows: llama.cpp applies the window inside a block, so blocks must fit it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.oracle.families import family_model
from slm_core.architectures import EMBEDDING
from slm_core.gguf import GgufFile
from slm_core.protocols import BackendModel, Context
from slm_core.quant import dequantize_rows
from slm_core.types import Capability, ContextOptions, KvType, ModelOptions, Pos
from slm_llamacpp.backend import LlamaCppBackend
from slm_native.backend import NativeBackend

WINDOW, N = 48, 90
F32 = {"kv_type_k": KvType.F32, "kv_type_v": KvType.F32}
BOUND = 1e-3  # relative; llama.cpp computes GELU by a table in half precision


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_model(tmp_path_factory.mktemp("family"), "gemma3")


def decode(context: Context, tokens: list[int], rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Decode three batches. Each ends in a bidirectional block of embedding rows and tokens."""
    rows_of_logits = []
    for start in range(0, N, 30):
        batch = context.new_batch()
        batch.extend(tokens[start : start + 10], Pos(0, start), logits="all")
        batch.add_embeddings(rows[start + 10 : start + 20], Pos(0, start + 10), logits="all")
        batch.extend(tokens[start + 20 : start + 30], Pos(0, start + 20), logits="all")
        batch.join_block(15)
        rows_of_logits.append(context.decode(batch).copy())
    return np.concatenate(rows_of_logits)


def test_bidirectional_blocks_in_windows_equal_the_native_engine(gemma3: Path) -> None:
    """Embedding rows replace some tokens. llama.cpp scales the embeddings of tokens, not rows."""
    tokens = np.random.default_rng(2).integers(0, 300, N).tolist()
    with GgufFile.open(gemma3) as file:
        table = file.tensors[EMBEDDING]
        rows = dequantize_rows(file.tensor_data(EMBEDDING), table.ggml_type, table.shape[1], np.array(tokens))
    logits = []
    reference = ModelOptions(backend_options={"tier": "reference"})
    for backend, options in ((NativeBackend(), reference), (LlamaCppBackend(), ModelOptions(n_threads=1))):
        with backend.load(gemma3, options) as model:
            logits.append(_rows_of(model, tokens, 3 * rows))
    errors = np.linalg.norm(logits[0] - logits[1], axis=1) / np.linalg.norm(logits[0], axis=1)
    assert errors.max() <= BOUND


def _rows_of(model: BackendModel, tokens: list[int], rows: NDArray[np.float32]) -> NDArray[np.float32]:
    with model.new_context(ContextOptions(n_ctx=128, n_seq_max=1, n_batch=WINDOW, **F32)) as context:
        assert Capability.BIDIRECTIONAL_BLOCKS in context.capabilities
        return decode(context, tokens, rows)


def test_blocks_are_undeclared_if_batches_exceed_the_window(gemma3: Path) -> None:
    with (
        LlamaCppBackend().load(gemma3, ModelOptions(n_threads=1)) as model,
        model.new_context(ContextOptions(n_ctx=128, n_seq_max=1, n_batch=WINDOW + 1)) as context,
    ):
        assert Capability.BIDIRECTIONAL_BLOCKS not in context.capabilities
