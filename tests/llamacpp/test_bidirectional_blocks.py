"""Spans of a model with windows: llama.cpp masks by the window in them, so that they must not be longer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.oracle.families import family_model
from slm_core.architectures import EMBEDDING
from slm_core.gguf import GgufFile
from slm_core.protocols import Context, Model
from slm_core.quant import dequantize_rows
from slm_core.types import Capability, ContextOptions, KvType, ModelOptions, Pos
from slm_llamacpp.backend import LlamaCppBackend
from slm_native.backend import NativeBackend

WINDOW, N = 48, 90
F32 = {"kv_type_k": KvType.F32, "kv_type_v": KvType.F32}
BOUND = 1e-3  # llama.cpp looks GELU up in a table of half precision


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_model(tmp_path_factory.mktemp("family"), "gemma3")


def decoded(context: Context, tokens: list[int], rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Three batches, each of which ends in a span of rows and tokens."""
    found = []
    for start in range(0, N, 30):
        batch = context.new_batch()
        batch.extend(tokens[start : start + 10], Pos(0, start), logits="all")
        batch.add_embeddings(rows[start + 10 : start + 20], Pos(0, start + 10), logits="all")
        batch.extend(tokens[start + 20 : start + 30], Pos(0, start + 20), logits="all")
        batch.join_block(15)
        found.append(context.decode(batch).copy())
    return np.concatenate(found)


def test_bidirectional_blocks_in_windows_equal_the_native_engine(gemma3: Path) -> None:
    """The rows of some tokens stand in their place: llama.cpp multiplies embeddings of tokens alone."""
    tokens = np.random.default_rng(2).integers(0, 300, N).tolist()
    with GgufFile.open(gemma3) as file:
        table = file.tensors[EMBEDDING]
        rows = dequantize_rows(file.tensor_data(EMBEDDING), table.ggml_type, table.shape[1], np.array(tokens))
    found = []
    reference = ModelOptions(backend_options={"tier": "reference"})
    for backend, how in ((NativeBackend(), reference), (LlamaCppBackend(), ModelOptions(n_threads=1))):
        with backend.load(gemma3, how) as model:
            found.append(_rows_of(model, tokens, 3 * rows))
    errors = np.linalg.norm(found[0] - found[1], axis=1) / np.linalg.norm(found[0], axis=1)
    assert errors.max() <= BOUND


def _rows_of(model: Model, tokens: list[int], rows: NDArray[np.float32]) -> NDArray[np.float32]:
    with model.new_context(ContextOptions(n_ctx=128, n_seq_max=1, n_batch=WINDOW, **F32)) as context:
        assert Capability.BIDIRECTIONAL_BLOCKS in context.capabilities
        return decoded(context, tokens, rows)


def test_batches_that_are_larger_than_the_window_have_no_spans(gemma3: Path) -> None:
    with (
        LlamaCppBackend().load(gemma3, ModelOptions(n_threads=1)) as model,
        model.new_context(ContextOptions(n_ctx=128, n_seq_max=1, n_batch=WINDOW + 1)) as context,
    ):
        assert Capability.BIDIRECTIONAL_BLOCKS not in context.capabilities
