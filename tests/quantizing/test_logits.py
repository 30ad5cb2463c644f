"""Quantized models run: llama.cpp and the native engine agree on them, and they lose no more than llama.cpp's own."""

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
    """Random weights in the shape of a small qwen3, rows of 256 and 640."""
    path = tmp_path_factory.mktemp("models") / "f16.gguf"
    synth_gguf.write_f16(path, "tiny-qwen3", str(shared_dir / "oracles" / "vocabs" / "ggml-vocab-llama-spm.gguf"), 0)
    return path


@pytest.fixture
def native_logits(feed):
    """What float32 on the dequantized weights gives."""

    def logits(path: Path, tokens: list[int]) -> np.ndarray:
        with slm.load(path, backend="native") as model, model.new_context(n_ctx=64, n_batch=64) as context:
            return feed(context, tokens)

    return logits


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", ["Q8_0", "Q5_K_M", "Q5_1", "Q4_K_M", "Q4_0", "TQ2_0", "Q1_0"])
def test_llama_cpp_reads_what_we_write(source, tmp_path, native_logits, llama_cpp_logits, random_tokens, name) -> None:
    target, tokens = tmp_path / "new.gguf", random_tokens(N_TOKENS, 32000)
    quantize_model(source, target, name)
    # llama.cpp rounds activations to 8 bits before each product, which moves logits of this shape by 2 percent,
    # whatever the type of the weights. A block read wrongly moves them by as much as they are large.
    assert distance(llama_cpp_logits(target, tokens), native_logits(target, tokens)) < 0.05


@pytest.mark.parametrize("name", ["Q4_K_M", "Q5_K_S"])
def test_logits_are_as_near_to_the_floats_as_those_of_llama_cpp(
    source, tmp_path, native_logits, random_tokens, name
) -> None:
    tokens = random_tokens(N_TOKENS, 32000)
    floats = native_logits(source, tokens)
    quantize_model(source, tmp_path / "ours.gguf", name)
    llama_quantize(source, tmp_path / "theirs.gguf", RECIPES[name].file_type)
    ours = distance(native_logits(tmp_path / "ours.gguf", tokens), floats)
    theirs = distance(native_logits(tmp_path / "theirs.gguf", tokens), floats)
    # Errors of weights, at most 1.02 times as large, meet one draw of activations; another differs by a few percent.
    assert ours < 1.1 * theirs, f"{ours:.4f} from the logits of the floats, llama.cpp's file {theirs:.4f}"
