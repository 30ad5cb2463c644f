"""Each metadata key and tensor of a file is read, known to be neutral, or refused by name."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from slm_conformance.oracle.factories import SHAPES, make_tiny_model
from slm_conformance.oracle.gguf_writer import StoredTensor
from slm_core.architectures import check_tensors, read_spec
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.types import ContextOptions


@pytest.fixture
def read(tmp_path):
    """Reads and checks a model with changed metadata and tensors; the value None removes a key or a tensor."""

    def read_changed(architecture, metadata=None, tensors=None):
        tiny = make_tiny_model(architecture)
        for target, changes in ((tiny.metadata, metadata or {}), (tiny.tensors, tensors or {})):
            for key, value in changes.items():
                target.pop(key, None)
                if value is not None:
                    target[key] = value
        with GgufFile.open(tiny.write(tmp_path / "m.gguf")) as file:
            spec = read_spec(file)
            check_tensors(file, spec)
            return spec

    return read_changed


def zeros(*shape: int) -> StoredTensor:
    return StoredTensor.pack(np.zeros(shape, np.float32), "f32")


@pytest.mark.parametrize("architecture", SHAPES)
def test_sizes_equal_the_files(read, architecture):
    spec, shape = read(architecture), SHAPES[architecture]
    actual = (spec.n_layers, spec.n_embd, spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.norm_eps)
    expected = (shape.n_layers, shape.n_embd, shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.norm_eps)
    assert actual == pytest.approx(expected)
    assert {layer.rope.freq_base for layer in spec.layers} == {shape.rope_freq_base}


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize(
    "key",
    ["block_count", "embedding_length", "feed_forward_length", "attention.head_count",
     "attention.layer_norm_rms_epsilon"],
)  # fmt: skip
def test_the_error_names_a_missing_key(read, architecture, key):
    with pytest.raises(UnsupportedModel, match=f"'{architecture}.{key}' is missing"):
        read(architecture, {f"{architecture}.{key}": None})


def test_only_llama_files_may_omit_the_rope_base(read):
    assert read("llama", {"llama.rope.freq_base": None}).layers[0].rope.freq_base == 10_000
    for architecture in ("qwen2", "qwen3"):
        with pytest.raises(UnsupportedModel, match=f"'{architecture}.rope.freq_base' is missing"):
            read(architecture, {f"{architecture}.rope.freq_base": None})


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("leading_dense_block_count", 1, "1"),
        ("nextn_predict_layers", 1, "1"),
        ("attention.causal", False, "False"),
        ("use_parallel_residual", True, "True"),
        ("rope.scaling.type", "longrope", "'longrope'"),
        ("rope.scaling.alpha", 2.0, "2.0"),
        ("attention.value_length", 48, "48"),
        ("rope.dimension_count", 34, "34 of a head's"),
        ("rope.dimension_count", 7, "7 of a head's"),
        ("logit_scale", 0.5, "0.5"),
        ("something.new", "x" * 200, r"'x{79}\.\.\."),
        ("attention.head_count", [6, 6, 5], "array"),
        ("pooling.kind", ["a", "b"], r"\['a', 'b'\]"),
    ],
)
def test_the_error_names_an_unimplemented_value(read, architecture, key, value, shown):
    with pytest.raises(UnsupportedModel, match=rf"{key}'?.*") as raised:
        read(architecture, {f"{architecture}.{key}": value})
    assert raised.match(shown)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize(("window", "shown"), [(4096, "4096"), ([0, 0, 0], "array")])
def test_an_unimplemented_sliding_window_is_refused(read, architecture, window, shown):
    with pytest.raises(UnsupportedModel, match=f"attention.sliding_window.*{shown}"):
        read(architecture, {f"{architecture}.attention.sliding_window": window})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window", 0),
        ("expert_count", 0),
        ("attention.causal", True),
        ("use_parallel_residual", False),
        ("tensor_data_layout", "Meta AI original pth"),
        ("rope.scaling.finetuned", True),
        ("rope.scaling.factor", 0.0),
        ("rope.scaling.original_context_length", 8192),
        ("attention.head_count_kv", [2, 2, 2]),
        ("vocab_size", 17),
    ],
)
def test_neutral_values_are_accepted(read, key, value):
    assert read("llama", {f"llama.{key}": value}) == read("llama")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("block_count", "three"),
        ("attention.head_count_kv", 4),
        ("rope.freq_base", -1.0),
        ("rope.freq_base", float("nan")),
        ("rope.freq_base", 10_000),
        ("rope.freq_base", 1.0),
        ("rope.scaling.factor", 1e35),
        ("rope.scaling.attn_factor", 0.0),
        ("attention.layer_norm_rms_epsilon", float("inf")),
        ("feed_forward_length", 159),
        ("embedding_length", 95),
        ("attention.key_length", 2**31 - 2),
        ("block_count", 2**31 - 1),  # refused quickly, without a loop over the blocks
    ],
)
def test_an_impossible_value_is_refused_in_one_line(read, key, value):
    changes = {f"llama.{key}": value}
    if key == "attention.key_length":
        changes |= {"llama.attention.value_length": value, "llama.rope.dimension_count": value}
    with pytest.raises(InvalidModelFile) as raised:
        read("llama", changes)
    assert "\n" not in str(raised.value)


def test_slm_keys_are_checked_as_strictly(read):
    """Without YaRN no code reads whether the YaRN ramp is truncated, so the key is unknown."""
    for key in ("slm.rope.yarn_truncate", "slm.something.new"):
        with pytest.raises(UnsupportedModel, match=rf"'{key}' is False.*unknown here"):
            read("llama", {key: False})


def test_the_error_lists_the_architectures_if_one_is_unknown(read):
    for name in ("gemma9", "_decoder", "llama.evil", "../llama", "x" * 10_000):
        with pytest.raises(UnsupportedModel, match=r"is unknown here \(accepted: .*llama, .*qwen2, .*qwen3") as raised:
            read("llama", {"general.architecture": name})
        assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "token_embd.weight"),
        ("llama", "output_norm.weight"),
        ("llama", "blk.2.ffn_down.weight"),
        ("qwen2", "blk.1.attn_k.bias"),
        ("qwen3", "blk.0.attn_q_norm.weight"),
    ],
)
def test_the_error_names_a_missing_tensor(read, architecture, name):
    with pytest.raises((InvalidModelFile, UnsupportedModel), match=rf"tensor '{name}'.* is missing"):
        read(architecture, tensors={name: None})


@pytest.mark.parametrize(
    ("architecture", "name", "shape", "expected"),
    [
        ("llama", "blk.0.attn_q.weight", (96, 192), r"\(192, 96\)"),
        ("llama", "rope_freqs.weight", (32,), r"\(16,\)"),
        ("llama", "blk.1.attn_norm.weight", (1, 96), r"\(96,\)"),
        ("llama", "output.weight", (7, 96), r"\(3\d\d, 96\)"),
        ("qwen2", "blk.2.attn_v.bias", (33,), r"\(32,\)"),
        ("qwen3", "blk.2.attn_k_norm.weight", (64,), r"\(32,\)"),
    ],
)
def test_the_error_names_a_wrong_shape(read, architecture, name, shape, expected):
    actual = str(shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(InvalidModelFile, match=rf"tensor '{name}' has the shape {actual}, not {expected}"):
        read(architecture, tensors={name: zeros(*shape)})


@pytest.mark.parametrize(
    ("architecture", "name", "shape"),
    [
        ("llama", "blk.0.attn_qkv.weight", (4, 96)),
        ("llama", "blk.3.attn_norm.weight", (96,)),  # one block too many
        ("qwen2", "rope_freqs.weight", (8,)),  # llama.cpp applies them to llama only
        ("qwen3", "blk.0.attn_q.bias", (192,)),
        ("qwen3", "blk.0.ffn_gate_exps.weight", (8, 160, 64)),
    ],
)
def test_an_unknown_tensor_is_refused(read, architecture, name, shape):
    with pytest.raises(UnsupportedModel, match=f"tensor '{name}' is unknown for {architecture} models"):
        read(architecture, tensors={name: zeros(*shape)})


def test_a_file_with_only_a_vocabulary_is_refused(read):
    tensors = dict.fromkeys(make_tiny_model("llama").tensors)
    with pytest.raises(UnsupportedModel, match="holds no weights, only a vocabulary"):
        read("llama", tensors=tensors)


def test_optional_biases_in_llama_files_are_applied(
    tmp_path, load, feed, random_tokens, assert_close, llama_cpp_logits
):
    tiny = make_tiny_model("llama", seed=4)
    rng = np.random.default_rng(0)
    for name, matrix in list(tiny.tensors.items()):
        if name.startswith("blk.") and len(matrix.shape) == 2:
            bias = rng.standard_normal(matrix.shape[0]).astype(np.float32) / 4
            tiny.tensors[name.replace("weight", "bias")] = StoredTensor.pack(bias, "f32")
    path, tokens = tiny.write(tmp_path / "m.gguf"), random_tokens(40)
    with load(path).new_context(ContextOptions(n_ctx=64)) as context:
        assert_close(feed(context, tokens), llama_cpp_logits(path, tokens), 1e-4)


def test_scales_of_matrices_are_applied(tmp_path, load, feed, random_tokens, assert_close, llama_cpp_logits):
    """NVFP4 files have a scale per matrix. A scale multiplies the product, not the bias; attn_q has a bias here."""
    tiny = make_tiny_model("llama", seed=4)
    rng = np.random.default_rng(0)
    tiny.tensors["blk.0.attn_q.bias"] = StoredTensor.pack(rng.standard_normal(192).astype(np.float32), "f32")
    for name in ("blk.0.attn_q.scale", "blk.1.ffn_down.scale", "blk.2.attn_output.scale"):
        tiny.tensors[name] = StoredTensor.pack(rng.uniform(0.5, 2, 1).astype(np.float32), "f32")
    path, tokens = tiny.write(tmp_path / "m.gguf"), random_tokens(40)
    with load(path).new_context(ContextOptions(n_ctx=64)) as context:
        assert_close(feed(context, tokens), llama_cpp_logits(path, tokens), 1e-4)


def test_an_ignored_tensor_is_logged(read, caplog):
    with caplog.at_level(logging.INFO, "slm_core"):
        read("qwen3", tensors={"blk.1.ffn_up.input_scale": zeros(1)})
    assert "blk.1.ffn_up.input_scale" in caplog.text


def test_a_tensor_of_an_integer_type_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    tiny = make_tiny_model("llama")
    name = "blk.1.ffn_norm.weight"
    tiny.write(path)
    data = bytearray(path.read_bytes())
    at = data.index(name.encode()) + len(name) + 4 + 8  # after the number of dimensions and the single dimension
    assert data[at : at + 4] == bytes(4), "F32"
    data[at : at + 4] = (26).to_bytes(4, "little")
    path.write_bytes(data)
    with GgufFile.open(path) as file, pytest.raises(UnsupportedModel, match=rf"tensor '{name}' is of type I32"):
        check_tensors(file, read_spec(file))


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_rope_factors_must_be_positive_numbers(tmp_path, load, factor):
    tiny = make_tiny_model("llama")
    tiny.tensors["rope_freqs.weight"] = StoredTensor.pack(np.array([factor] + [1] * 15, np.float32), "f32")
    with pytest.raises(InvalidModelFile, match=r"'rope_freqs\.weight'"):
        load(tiny.write(tmp_path / "m.gguf"))
