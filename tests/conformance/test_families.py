"""Every family on the native engine and on llama.cpp: declared edits work, and both engines agree."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from slm_conformance.oracle.families import family_model
from slm_conformance.oracle.family_table import FAMILIES
from slm_core.adapters import write_control_vector
from slm_core.architectures import read_spec
from slm_core.errors import UnsupportedEdit
from slm_core.gguf import GgufFile
from slm_core.plugins import registry
from slm_core.protocols import BackendModel, Context
from slm_core.quant import dequantize_rows
from slm_core.types import Capability, ContextOptions, EditLevel, KvType, ModelOptions, Pos

N = 90  # tokens; longer than every sliding window
BACKENDS = ("native", "llamacpp") if find_spec("llama_cpp") else ("native",)
STATES = ("mamba", "falcon_mamba", "lfm2", "granitehybrid", "falcon_h1", "jamba", "rwkv7")
# float32 in both engines; twice the spacing of float16 if llama.cpp computes GELU from a table.
COMPUTES_OTHERWISE = "gemma3n"  # llama.cpp: see docs/architectures.md
REFUSED = ("phi3_window", "phimoe")  # by llamacpp: the file, or positions beyond its window
BOUND, BOUND_ACROSS = 1e-4, 1e-3


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory) -> Path:
    return family_model(tmp_path_factory.mktemp("family"), request.param)


@pytest.fixture(scope="module")
def models(path) -> Iterator[dict[str, BackendModel]]:
    loaded = {}
    for name in BACKENDS[:1] if path.name.startswith(REFUSED) else BACKENDS:
        backend = registry().backend(name)
        assert backend.supports(path).supported, backend.supports(path).reason
        loaded[name] = backend.load(path, ModelOptions(n_threads=1 if name == "llamacpp" else None))
    yield loaded
    for model in loaded.values():
        model.close()


@pytest.fixture
def tokens(random_tokens) -> list[int]:
    return random_tokens(N, seed=3)


def new_context(model: BackendModel) -> Context:
    return model.new_context(ContextOptions(n_ctx=256, n_seq_max=2, kv_type_k=KvType.F32, kv_type_v=KvType.F32))


@pytest.mark.parametrize("name", BACKENDS)
def test_truncate_fork_and_dump_agree_with_the_edit_level(models, name, tokens, feed, assert_close):
    if name not in models:
        pytest.skip("llamacpp refuses the file, or positions beyond its window")
    with new_context(models[name]) as context:
        whole = feed(context, tokens)
        if context.edit_level >= EditLevel.TRUNCATE:
            context.truncate(Pos(0, 60))
            assert_close(feed(context, tokens[60:]), whole[60:], BOUND)
        else:
            with pytest.raises(UnsupportedEdit):
                context.truncate(Pos(0, 60))
        context.fork(0, 1)
        dump = context.dump(0)
        after = feed(context, tokens[:5])
        assert_close(feed(context, tokens[:5], seq_id=1), after, BOUND)
        context.clear()
        context.restore(0, dump)
        assert_close(feed(context, tokens[:5]), after, BOUND)


def test_hidden_states_agree_between_engines(models, path, tokens):
    rows = []
    for model in models.values():
        with new_context(model) as context:
            batch = context.new_batch()
            batch.extend(tokens, Pos(0, 0), logits="all")
            rows.append(context.embed(batch).copy())
    if len(rows) == 2 and not path.name.startswith(COMPUTES_OTHERWISE):
        errors = np.linalg.norm(rows[0] - rows[1], axis=1) / np.linalg.norm(rows[1], axis=1)
        assert errors.max() < BOUND_ACROSS


def test_a_cut_agrees_between_engines(models, path, tokens, feed, assert_close):
    rows = []
    for model in models.values():
        with new_context(model) as context:
            feed(context, tokens)
            if context.edit_level < EditLevel.CUT:
                with pytest.raises(UnsupportedEdit):
                    context.cut(Pos(0, 20), Pos(0, 31))
                continue
            context.cut(Pos(0, 20), Pos(0, 31))
            rows.append(feed(context, tokens[:5]))
    if len(rows) == 2 and not path.name.startswith(COMPUTES_OTHERWISE):
        assert_close(rows[0], rows[1], BOUND_ACROSS)


def test_a_control_vector_agrees_between_engines(models, tmp_path, random_tokens, feed):
    """Directions after all layers but the first, with AltUp for each residual stream.

    The engines differ no more than twice as much as without the control vector.
    """
    tokens, rng = random_tokens(24, seed=6), np.random.default_rng(7)
    info, vector = models["native"].info, tmp_path / "vector.gguf"
    directions = {layer: rng.standard_normal(info.n_embd).astype(np.float32) for layer in range(1, info.n_layers)}
    write_control_vector(directions, vector)
    plain, steered = [], []
    for model in models.values():
        model.adapters.load(vector)
        with new_context(model) as context:
            context.set_adapters(0, {"vector": 0.7})
            steered.append(feed(context, tokens))
            plain.append(feed(context, tokens, seq_id=1))
        model.adapters.unload("vector")
        assert relative_error(steered[-1], plain[-1]) > 0.05, "the control vector changes nothing"
    if len(models) == 2:
        assert relative_error(*steered) < BOUND_ACROSS + 2 * relative_error(*plain)


def relative_error(rows: np.ndarray, expected: np.ndarray) -> float:
    return float((np.linalg.norm(rows - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())


def test_edit_levels_of_both_engines(models, path):
    """llama.cpp only truncates with sliding windows, NoPE layers, M-RoPE sections or scaled RoPE magnitudes, and cannot
    truncate recurrent states."""
    levels = {name: new_context(model).edit_level for name, model in models.items()}
    if path.name.startswith(STATES):
        assert levels == {"native": EditLevel.TRUNCATE, "llamacpp": EditLevel.REPLAY}
        return
    assert levels["native"] is (EditLevel.TRUNCATE if path.name.startswith("gpt2") else EditLevel.CUT)
    special = ("exaone4_hybrid", "olmo3", "gemma2", "gemma3", "gemma4", "cohere2", "smollm3", "llama_yarn", "phi3_long",
               "phi3_short", "gpt2-", "gpt_oss", "deepseek2-", "llama4", "qwen2vl", "qwen3vl")  # fmt: skip
    if "llamacpp" in levels:
        assert levels["llamacpp"] is (EditLevel.TRUNCATE if path.name.startswith(special) else EditLevel.CUT)


def test_embedding_rows_equal_tokens(models, path, random_tokens, feed, assert_close):
    """Rows of the embedding table give the logits of tokens; other rows give the same logits on both engines."""
    tokens, outputs = random_tokens(24, seed=5), []
    with GgufFile.open(path) as file:
        spec, ggml_type = read_spec(file), file.tensors["token_embd.weight"].ggml_type
        rows = dequantize_rows(file.tensor_data("token_embd.weight"), ggml_type, spec.n_embd, np.array(tokens))
    scaled = rows * np.float32(1 if spec.scales_rows else spec.embedding_scale)
    for model in models.values():
        with new_context(model) as context:
            if Capability.EMBEDDING_INPUT not in context.capabilities:
                continue
            if spec.layer_embedding_width is None:  # otherwise layers look up embeddings of token ids
                assert_close(feed_rows(context, scaled), feed(context, tokens, seq_id=1), BOUND)
                context.clear()
            feed(context, tokens[:5])
            outputs.append(feed_rows(context, rows[::-1] + rows))
    if len(outputs) == 2 and not path.name.startswith(COMPUTES_OTHERWISE):
        assert_close(outputs[0], outputs[1], BOUND_ACROSS)


def feed_rows(context: Context, rows: np.ndarray) -> np.ndarray:
    batch = context.new_batch()
    batch.add_embeddings(rows, Pos(0, context.length(0)), logits="all")
    return context.decode(batch).copy()
