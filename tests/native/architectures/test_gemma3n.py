"""gemma3n against llama.cpp, which computes the standard deviation of gates with n - 1."""

from __future__ import annotations

import numpy as np

from native.architectures.engines import make_subject, native_logits
from native.architectures.test_families import BOUND, GELU, N_DECODE, N_PREFILL, OPTIONS, TABLE_BOUND, gelu_by_table
from slm_conformance.oracle.families import family_model
from slm_core.architectures import read_spec
from slm_core.gguf import GgufFile
from slm_native.kernels import reference
from slm_native.kernels.reference import ReferenceKernels


def sample_threshold(self, x, n_deviations):
    cutoff = x.mean(axis=1, keepdims=True) + x.std(axis=1, keepdims=True, ddof=1) * np.float32(n_deviations)
    return np.maximum(x - cutoff, np.float32(0))


def test_gemma3n_equals_llama_cpp_except_for_the_deviation_of_gates(
    tmp_path, load, random_tokens, llama_cpp_logits, assert_close, monkeypatch
):
    chunks = [N_PREFILL, N_DECODE]
    tokens, path = random_tokens(sum(chunks)), make_subject(tmp_path, "gemma3n").path
    expected = llama_cpp_logits(path, tokens)
    monkeypatch.setattr(ReferenceKernels, "above_threshold", sample_threshold)
    with load(path).new_context(OPTIONS) as context:
        assert_close(native_logits(context, tokens, chunks), expected, TABLE_BOUND)
    for activation in GELU:
        monkeypatch.setitem(reference._ACTIVATIONS, activation, gelu_by_table)
    with load(path).new_context(OPTIONS) as context:
        actual = native_logits(context, tokens, chunks)
    errors = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(errors) <= BOUND, f"median error {np.median(errors):.1e}, with the same table of GELU"


def test_layers_with_shared_kv_store_no_keys(tmp_path):
    with GgufFile.open(family_model(tmp_path, "gemma3n")) as file:
        spec = read_spec(file)
    assert spec.attention_layers == list(range(20))
    assert [spec.layers[i].kv_layer for i in range(20, 25)] == [18, 18, 18, 18, 19]
    assert spec.kv_values_per_token == 20 * 2 * 16
