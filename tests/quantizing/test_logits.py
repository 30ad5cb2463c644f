"""Quantized models: llama.cpp and the native engine agree on them, and they err no more than files of llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import slm_core as slm
from ggml_library import llama_quantize
from slm_core.quantizing import RECIPES, quantize_model

N_TOKENS = 24


@pytest.fixture(scope="module")
def source(tmp_path_factory, synth_gguf, shared_dir) -> Path:
    """Random weights with the shape of a small qwen3; rows have 256 and 640 weights."""
    path = tmp_path_factory.mktemp("models") / "f16.gguf"
    synth_gguf.write_f16(path, "tiny-qwen3", str(shared_dir / "oracles" / "vocabs" / "ggml-vocab-llama-spm.gguf"), 0)
    return path


@pytest.fixture
def native_logits(feed):
    """Logits in float32 on the dequantized weights."""

    def logits(path: Path, tokens: list[int]) -> np.ndarray:
        with slm.load(path, backend="native") as model, model.new_context(n_ctx=64, n_batch=64) as context:
            return feed(context, tokens)

    return logits


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", ["Q8_0", "Q5_K_M", "Q5_1", "Q4_K_M", "Q4_0", "TQ2_0", "Q1_0"])
def test_llama_cpp_reads_our_files(source, tmp_path, native_logits, llama_cpp_logits, random_tokens, name) -> None:
    target, tokens = tmp_path / "new.gguf", random_tokens(N_TOKENS, 32000)
    quantize_model(source, target, name)
    # llama.cpp rounds activations to 8 bits before each product. For any weight type this changes logits of this shape
    # by 2 percent; a wrongly read block changes them by about 100 percent.
    assert relative_error(llama_cpp_logits(target, tokens), native_logits(target, tokens)) < 0.05


@pytest.mark.parametrize("name", ["Q4_K_M", "Q5_K_S"])
def test_our_files_err_no_more_than_those_of_llama_cpp(source, tmp_path, native_logits, random_tokens, name) -> None:
    tokens = random_tokens(N_TOKENS, 32000)
    exact = native_logits(source, tokens)
    quantize_model(source, tmp_path / "ours.gguf", name)
    llama_quantize(source, tmp_path / "theirs.gguf", RECIPES[name].file_type)
    ours = relative_error(native_logits(tmp_path / "ours.gguf", tokens), exact)
    theirs = relative_error(native_logits(tmp_path / "theirs.gguf", tokens), exact)
    # Weights err at most 1.02 times as much; for one sample of activations the ratio varies by a few percent.
    assert ours < 1.1 * theirs, f"relative error {ours:.4f}, that of llama.cpp's file is {theirs:.4f}"
