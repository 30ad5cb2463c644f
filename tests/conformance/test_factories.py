"""The tiny models, compared with other readers of their formats: the gguf package and the tokenizers library."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from slm_conformance.oracle.factories import CALM, SHAPES, make_tiny_model, tiny_model
from slm_conformance.oracle.gguf_writer import StoredTensor

WEIGHT_TYPES = ("f32", "f16", "q8_0")


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_every_tensor_equals_the_gguf_package(tmp_path, architecture, weight_type):
    model = make_tiny_model(architecture, weight_type, seed=3)
    reader = gguf.GGUFReader(tiny_model(tmp_path, architecture, weight_type, seed=3))
    assert [tensor.name for tensor in reader.tensors] == list(model.tensors)
    for tensor in reader.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(model.tensors[tensor.name].values(), expected, err_msg=tensor.name)


@pytest.mark.parametrize("architecture", SHAPES)
def test_metadata_is_read_by_the_gguf_package(tmp_path, architecture):
    model = make_tiny_model(architecture)
    reader = gguf.GGUFReader(tiny_model(tmp_path, architecture))
    for key, value in model.metadata.items():
        actual = reader.fields[key].contents()
        assert actual == (pytest.approx(value) if isinstance(value, float) else value), key


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_the_quantization_error_is_at_most_half_a_step(weight_type):
    values = np.random.default_rng(1).standard_normal((48, 96), np.float32)
    error = np.abs(StoredTensor.pack(values, weight_type).values() - values)
    largest = np.abs(values).reshape(48, 3, 32).max(axis=2).repeat(32, axis=1)
    # q8_0: half a step of largest/127, plus the float16 rounding of the step (2**-11 relative) for up to 127 steps.
    step = {"f32": 0 * largest, "f16": np.abs(values) * 2**-11, "q8_0": largest * (0.5 / 127 + 2**-11)}[weight_type]
    assert (error <= step * (1 + 1e-5)).all(), f"largest excess {(error - step).max():.2e}"
    assert weight_type == "f32" or error.max() > 0


def test_equal_arguments_give_equal_bytes_and_seeds_differ(tmp_path):
    first = tiny_model(tmp_path, "qwen3", "q8_0", seed=0).read_bytes()
    assert tiny_model(tmp_path, "qwen3", "q8_0", seed=0).read_bytes() == first
    other = make_tiny_model("qwen3", "q8_0", seed=1).tensors
    same = [name for name, tensor in make_tiny_model("qwen3", "q8_0", seed=0).tensors.items() if tensor == other[name]]
    assert same == []


def test_a_calm_model_differs_only_by_larger_embeddings():
    model, calm = make_tiny_model("llama"), make_tiny_model("llama", calm=True)
    ratios = {name: calm.tensors[name].values() / tensor.values() for name, tensor in model.tensors.items()}
    assert {name for name, ratio in ratios.items() if (ratio != 1).any()} == {"token_embd.weight"}
    np.testing.assert_array_equal(ratios["token_embd.weight"], CALM)


def test_matrices_are_not_square_if_the_architecture_allows_it():
    for architecture, shape in SHAPES.items():
        square = [n for n, t in make_tiny_model(architecture).tensors.items() if t.shape == (shape.n_embd,) * 2]
        # Both qwen2 tie head_dim to n_embd / n_heads.
        allowed = 2 * shape.n_layers if architecture in ("qwen2", "qwen2vl") else 0
        assert len(square) == allowed, f"{architecture}: {square}"


def test_the_vocabulary_equals_a_tokenizer_with_its_merges():
    tokenizers = pytest.importorskip("tokenizers")
    metadata = make_tiny_model("qwen2").metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert len(set(tokens)) == len(tokens)
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    model = tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tokenizer.encode("hello you, the dog").tokens == ["hello", "Ġyou", ",", "Ġthe", "Ġdog"]


def test_models_are_small(tmp_path: Path):
    sizes = {a: tiny_model(tmp_path, a, "f32").stat().st_size for a in SHAPES}
    assert max(sizes.values()) < 2_000_000, sizes
