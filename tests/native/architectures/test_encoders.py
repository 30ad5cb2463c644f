"""Every encoder against two other engines on the same random weights: hidden states and embeddings of texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import slm_core as slm
from native.architectures.checkpoints import save_directory
from native.architectures.encoders import CASES, POST_LAYERS, dense_layers
from native.architectures.engines import Rows, encoder_states, make_subject
from native.architectures.exported import export, with_vocabulary
from native.architectures.test_families import BOUND, TABLE_BOUND, gelu_by_table, uses_gelu
from native.exact import exact
from slm_conformance.oracle.families import family_tensors, write_family
from slm_conformance.oracle.family_table import ENCODERS
from slm_conformance.oracle.gguf_writer import StoredTensor
from slm_core.architectures import EMBEDDING, Activation, read_spec
from slm_core.checkpoints import Checkpoint
from slm_core.embedding import embed, token_states
from slm_core.errors import InvalidPosition, UnsupportedModel, UnsupportedOutput
from slm_core.gguf import GgufFile
from slm_core.quant import dequantize_rows
from slm_core.types import Capability, Pooling, Pos
from slm_native.kernels import reference

N = 200  # tokens, more than any window
OPTIONS = exact(n_ctx=512, n_seq_max=3, n_batch=512)


class Expected(NamedTuple):
    """An encoder's file, and the hidden states of transformers and llama.cpp."""

    family: str
    path: Path
    transformers: Rows
    llama_cpp: Rows


@pytest.fixture(scope="module")
def tokens(random_tokens) -> list[int]:
    return random_tokens(N)


@pytest.fixture(scope="module", params=ENCODERS)
def expected(request, tmp_path_factory, tokens, llama_cpp_states) -> Expected:
    family = request.param
    subject = make_subject(tmp_path_factory.mktemp("encoder"), family, CASES)
    states = POST_LAYERS.get(family, lambda rows: rows)(encoder_states(subject.model, tokens))
    return Expected(family, subject.path, states, llama_cpp_states(subject.path, tokens))


def states_of(model: Any, *texts: Sequence[int]) -> list[Rows]:
    with model.new_context(OPTIONS) as context:
        return list(token_states(context, texts))


def test_every_encoder_has_a_case():
    assert ENCODERS.keys() == CASES.keys()


def test_hidden_states_equal_the_other_engines(expected, tier, load, tokens, assert_close, record_property):
    """tools/architectures_page.py writes the recorded properties to docs/architectures.md."""
    (actual,) = states_of(load(expected.path, tier), tokens)
    # llama.cpp computes GELU by a table; errors of layers are independent, so their squares add up.
    n_layers = int(str(ENCODERS[expected.family].metadata["block_count"]))
    bound = TABLE_BOUND * n_layers**0.5 if uses_gelu(expected.path) else BOUND
    about = {"family": expected.family, "architecture": ENCODERS[expected.family].architecture}
    about |= {"edit level": "none", "note": "an encoder: hidden states"}
    about["transformers"] = assert_close(actual, expected.transformers, BOUND)
    about["llama.cpp"] = assert_close(actual, expected.llama_cpp, bound)
    for name, value in about.items():
        record_property(name, value)


def test_hidden_states_equal_llama_cpp_with_its_gelu_table(expected, load, tokens, monkeypatch):
    for activation in (Activation.GELU, Activation.GELU_TANH):
        monkeypatch.setitem(reference._ACTIVATIONS, activation, gelu_by_table)
    (actual,) = states_of(load(expected.path), tokens)
    errors = np.linalg.norm(actual - expected.llama_cpp, axis=1) / np.linalg.norm(expected.llama_cpp, axis=1)
    assert np.median(errors) <= BOUND


def test_texts_in_one_batch_give_the_same_states_as_alone(expected, tier, load, tokens, assert_close):
    model = load(expected.path, tier)
    texts = [tokens[:70], tokens[70:71], tokens[71:]]
    for batched, text in zip(states_of(model, *texts), texts, strict=True):
        assert_close(batched, *states_of(model, text), BOUND)
    with model.new_context(OPTIONS) as context:
        batch = context.new_batch()
        for i in range(60):
            batch.add(tokens[i], Pos(i % 2, i // 2), logits=True)
        rows = context.embed(batch).copy()
        assert context.n_free == context.n_ctx, "an encoder stores nothing"
    assert_close(rows[0::2], *states_of(model, tokens[:60:2]), BOUND)
    assert_close(rows[1::2], *states_of(model, tokens[1:60:2]), BOUND)


def test_embedding_rows_give_the_states_of_their_tokens(expected, tier, load, tokens, assert_close):
    with GgufFile.open(expected.path) as file:
        spec, ggml_type = read_spec(file), file.tensors[EMBEDDING].ggml_type
        rows = dequantize_rows(file.tensor_data(EMBEDDING), ggml_type, spec.n_embd, np.array(tokens[:20]))
    model = load(expected.path, tier)
    with model.new_context(OPTIONS) as context:
        batch = context.new_batch()
        batch.extend(tokens[:3], Pos(0, 0), logits="all")
        batch.add_embeddings(
            rows[3:] * np.float32(1 if spec.scales_rows else spec.embedding_scale), Pos(0, 3), logits="all"
        )
        actual = context.embed(batch).copy()
    assert_close(actual, *states_of(model, tokens[:20]), BOUND)


def test_capabilities_and_refused_calls_of_encoders(expected, tier, load, tokens):
    model = load(expected.path, tier)
    with model.new_context(OPTIONS) as context:
        outputs_and_inputs = {Capability.EMBEDDINGS, Capability.EMBEDDING_INPUT, Capability.ADAPTERS}
        assert context.capabilities == {*outputs_and_inputs, Capability.ENCODER, Capability.LAYER_STATES}
        batch = context.new_batch()
        batch.extend(tokens[:5], Pos(0, 0), logits="last")
        with pytest.raises(UnsupportedOutput, match="is an encoder"):
            context.decode(batch)
        batch.clear()
        batch.extend(tokens[:5], Pos(0, 5), logits="last")
        with pytest.raises(InvalidPosition):
            context.embed(batch)
        pooling = {"bert": Pooling.CLS, "modern_bert": None}.get(expected.family, Pooling.MEAN)
        assert model.info.pooling is pooling
        assert embed(context, [tokens[:5]], model.info.pooling).pooling is (pooling or Pooling.MEAN)


def test_texts_beyond_learned_positions_are_refused(expected, load, random_tokens):
    if expected.family != "bert":
        return
    model, text = load(expected.path), random_tokens(513)
    with model.new_context(exact(n_ctx=600, n_batch=600)) as context:
        with pytest.raises(InvalidPosition, match="learned positions 0 to 511"):
            embed(context, [text])
        assert embed(context, [text[:512]]).n_tokens == (512,)


def test_a_causal_bert_is_refused(tmp_path, load, monkeypatch):
    tensors = {
        name: StoredTensor.pack(np.ones(shape, np.float32), "f32") for name, shape in family_tensors("bert").items()
    }
    bert = ENCODERS["bert"]
    monkeypatch.setitem(ENCODERS, "bert", replace(bert, metadata={**bert.metadata, "attention.causal": True}))
    with pytest.raises(UnsupportedModel, match=r"'bert\.attention\.causal' is True"):
        load(write_family(tmp_path / "m.gguf", "bert", tensors))


@pytest.mark.parametrize("family", ["bert", "modern_bert", "nomic_bert", "gemma_embedding"])
def test_a_directory_equals_the_gguf_file(tmp_path, load, tokens, assert_close, family):
    """Its hidden states equal transformers', and the files of sentence-transformers set the pooling."""
    subject = make_subject(tmp_path, family, CASES)
    folder = save_directory(subject.model, tmp_path / "hf")
    (folder / "1_Pooling").mkdir()
    if family == "gemma_embedding":
        _save_dense(folder)
    about = {"word_embedding_dimension": 144, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(about))
    with Checkpoint(folder) as directory, GgufFile.open(subject.path) as file:
        assert directory.tensors.keys() == file.tensors.keys()
        assert all(directory.tensor_data(name).tobytes() == file.tensor_data(name).tobytes() for name in file.tensors)
        assert read_spec(directory) == read_spec(file)
    if family == "nomic_bert":
        _check_published_configuration(folder)
    model = load(folder)
    assert model.info.pooling is Pooling.MEAN
    expected_states = POST_LAYERS.get(family, lambda rows: rows)(encoder_states(subject.model, tokens))
    assert_close(*states_of(model, tokens), expected_states, BOUND)
    _check_exported(folder, tmp_path)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(about | {"pooling_mode_cls_token": True}))
    with pytest.raises(UnsupportedModel, match="accepted: one of pooling_mode_mean_tokens"):
        Checkpoint(folder)


def _check_exported(folder: Path, place: Path) -> None:
    """As a GGUF file, the directory gives the same states, and llama.cpp reads it."""
    source = with_vocabulary(folder, place / "vocab")
    path = export(source, place / "exported.gguf")
    states = []
    for backend, model_path in (("native", source), ("native", path), ("llamacpp", path)):
        with slm.load(model_path, backend=backend) as model:
            assert model.info.pooling is Pooling.MEAN
            states.append(model.hidden_states("the dog runs over"))
    assert np.array_equal(states[0], states[1])
    assert np.abs(states[2] - states[0]).max() < 2e-3 * np.abs(states[0]).max()  # llama.cpp's table of GELU


def _save_dense(folder: Path) -> None:
    """Save the dense layers after pooling as sentence-transformers does; check that a bias is refused."""
    for name, weight in dense_layers().items():
        layer_folder = folder / f"{name[6]}_Dense"
        layer_folder.mkdir()
        save_file({"linear.weight": torch.from_numpy(weight)}, layer_folder / "model.safetensors")
        about = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": True}
        about["activation_function"] = "torch.nn.modules.linear.Identity"
        (layer_folder / "config.json").write_text(json.dumps(about))
        with pytest.raises(UnsupportedModel, match="'bias' is True"):
            Checkpoint(folder)
        (layer_folder / "config.json").write_text(json.dumps(about | {"bias": False}))


def _check_published_configuration(folder: Path) -> None:
    """Published configurations have other keys than the class of transformers."""
    with Checkpoint(folder) as directory:
        expected_spec = read_spec(directory)
    config = json.loads((folder / "config.json").read_text())
    names = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    flags = ("causal", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "qkv_proj_bias", "use_rms_norm")
    published = {name: config[transformers_name] for name, transformers_name in names.items()} | dict.fromkeys(
        flags, False
    )
    published |= {"model_type": "nomic_bert", "activation_function": "swiglu", "rotary_emb_base": 1000}
    published |= {"rotary_emb_fraction": 1.0, "rotary_scaling_factor": None, "use_flash_attn": True}
    (folder / "config.json").write_text(json.dumps(published))
    with Checkpoint(folder) as directory:
        assert read_spec(directory) == expected_spec
    (folder / "config.json").write_text(json.dumps(published | {"prenorm": True}))
    with pytest.raises(UnsupportedModel, match="'prenorm' is True"):
        Checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(config))
