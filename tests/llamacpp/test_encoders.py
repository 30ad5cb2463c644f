"""Encoders on llama.cpp against the native engine; other tests compare the native engine with transformers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from slm_conformance.oracle.families import family_model
from slm_conformance.oracle.family_table import ENCODERS
from slm_core.embedding import embed
from slm_core.errors import ContextClosed, InvalidOption, InvalidPosition, UnsupportedOutput
from slm_core.plugins import registry
from slm_core.protocols import BackendModel
from slm_core.types import Capability, ContextOptions, EditLevel, ModelOptions, Pooling, Pos

OPTIONS = ContextOptions(n_ctx=256, n_seq_max=3, n_batch=256)
# llama.cpp computes GELU by a table in half precision: two errors of 2 ** -11 per layer, whose squares add up.
BOUNDS = {"nomic_bert": 1e-4}
BOUND_PER_LAYER = 2 * 2**-11


@pytest.fixture(scope="module", params=ENCODERS)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def models(family, tmp_path_factory) -> Iterator[dict[str, BackendModel]]:
    path, models = family_model(tmp_path_factory.mktemp("encoder"), family), {}
    for name in ("native", "llamacpp"):
        backend = registry().backend(name)
        assert backend.supports(path).supported, backend.supports(path).reason
        models[name] = backend.load(path, ModelOptions())
    yield models
    for model in models.values():
        model.close()


def test_interleaved_sequences_equal_the_native_engine(models, family, random_tokens):
    rows, tokens = [], random_tokens(200)
    for model in models.values():
        with model.new_context(OPTIONS) as context:
            batch = context.new_batch()
            for i, token in enumerate(tokens):
                batch.add(token, Pos(i % 2, i // 2), logits=i % 3 != 1)
            context.embed(batch)
            rows.append(context.embed(batch).copy())
            assert context.n_free == context.n_ctx, "an encoder stores nothing"
    n_layers = int(str(ENCODERS[family].metadata["block_count"]))
    errors = np.linalg.norm(rows[0] - rows[1], axis=1) / np.linalg.norm(rows[1], axis=1)
    assert errors.max() < BOUNDS.get(family, BOUND_PER_LAYER * n_layers**0.5)


def test_texts_are_pooled_as_the_file_declares(models, random_tokens):
    texts = [random_tokens(n, seed=n) for n in (5, 90, 1, 30)]
    results = []
    for model in models.values():
        with model.new_context(OPTIONS) as context:
            results.append(embed(context, texts, model.info.pooling))
    assert results[0].pooling is results[1].pooling
    assert results[0].vectors == pytest.approx(results[1].vectors, abs=5e-3)


def test_capabilities_and_refused_calls(models, family, random_tokens):
    context = models["llamacpp"].new_context(OPTIONS)
    assert context.capabilities == {Capability.EMBEDDINGS, Capability.ENCODER, Capability.ADAPTERS}
    assert context.edit_level is EditLevel.REPLAY
    batch = context.new_batch()
    batch.extend(random_tokens(5), Pos(0, 0))
    with pytest.raises(UnsupportedOutput, match="is an encoder"):
        context.decode(batch)
    assert context.embed(batch).shape == (0, models["llamacpp"].info.n_embd)
    context.fork(0, 1)
    context.restore(2, context.dump(0))
    context.clear()
    with pytest.raises(InvalidOption, match="unknown KV type 'q3'"):
        models["llamacpp"].new_context(ContextOptions(kv_type_k="q3"))
    context.close()
    with pytest.raises(ContextClosed):
        context.embed(batch)
    if family == "bert":
        with models["llamacpp"].new_context(ContextOptions(n_ctx=600, n_batch=600)) as long:
            with pytest.raises(InvalidPosition, match="learned positions 0 to 511"):
                embed(long, [random_tokens(513)])
            assert embed(long, [random_tokens(512)]).pooling is Pooling.MEAN
