"""Every family either runs, and as on the native engine, or is refused by what the graph lacks for it."""

from __future__ import annotations

import pytest

from slm_conformance.families import family_model
from slm_conformance.family_table import FAMILIES
from slm_core.errors import UnsupportedModel
from slm_core.types import ContextOptions, ModelOptions
from slm_native.backend import NativeBackend
from slm_onnx.backend import OnnxBackend

RUNS = {"llama", "llama_tied", "llama_biases", "llama_linear", "llama3", "llama_yarn", "mistral", "qwen2", "qwen3",
        "internlm2", "ernie4_5", "exaone", "qwen2vl", "qwen3vl"}  # fmt: skip


@pytest.mark.parametrize("family", sorted(RUNS))
def test_a_family_that_runs_equals_the_native_engine(tmp_path, feed, random_tokens, assert_close, family):
    path, tokens, rows = family_model(tmp_path, family), random_tokens(60), []
    assert OnnxBackend().supports(path).supported
    for backend in (OnnxBackend(), NativeBackend()):
        options = ModelOptions(n_threads=1) if backend.name == "onnx" else ModelOptions()
        with backend.load(path, options) as model, model.new_context(ContextOptions(n_ctx=64)) as context:
            rows.append(feed(context, tokens))
    assert_close(rows[0], rows[1], 1e-4)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - RUNS))
def test_another_family_is_refused_by_what_is_missing(tmp_path, family):
    path = family_model(tmp_path, family)
    support = OnnxBackend().supports(path)
    assert not support.supported
    assert "lacks" in support.reason or "does not implement" in support.reason
    with pytest.raises(UnsupportedModel, match=r"which onnx lacks|onnx does not implement"):
        OnnxBackend().load(path, ModelOptions(n_threads=1))
