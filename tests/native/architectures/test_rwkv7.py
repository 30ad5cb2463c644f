"""Directories of RWKV-7 against the reference implementation and against GGUF files of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import slm_core as slm
from native.architectures.checkpoints import change_config, change_tensors
from native.architectures.engines import native_logits
from native.architectures.rwkv7 import (
    VOCABULARY,
    directory_tensors,
    plain_tensors,
    reference_logits,
    reference_tensors,
    write_directory,
    write_plain_directory,
)
from native.exact import exact
from slm_conformance.oracle.families import family_model, family_tensors
from slm_core.architectures import read_spec
from slm_core.checkpoints import Checkpoint
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.reading import recipe_of
from slm_core.errors import InvalidModelFile, UnsupportedModel, VocabError
from slm_core.gguf import GgufFile
from world_json import END

N_TOKENS = 60
BOUND = 1e-4  # clause 9 of the contract: float32, relative
OPTIONS = exact(n_ctx=N_TOKENS, n_batch=N_TOKENS)
DEFAULTS = {
    "a_low_rank_dim": 64,
    "attn": None,
    "attn_mode": "chunk",
    "decay_low_rank_dim": 64,
    "fuse_norm": True,
    "gate_low_rank_dim": 128,
    "head_dim": 64,
    "hidden_act": "sqrelu",
    "hidden_ratio": 4,
    "hidden_size": 2048,
    "intermediate_size": None,
    "max_position_embeddings": 2048,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "norm_first": True,
    "num_heads": None,
    "num_hidden_layers": 24,
    "tie_word_embeddings": False,
    "v_low_rank_dim": 16,
    "value_dim": None,
}
"""Defaults of ``RWKV7Config`` in flash-linear-attention 0.6.0."""
PLAIN = {
    "a_low_rank_dim": 24,
    "decay_low_rank_dim": 32,
    "gate_low_rank_dim": 40,
    "v_low_rank_dim": 16,
    "head_dim": 64,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "num_heads": 12,
    "num_hidden_layers": 12,
    "tie_word_embeddings": False,
    "use_deep_embed": False,
}
"""Defaults of ``Rwkv7Config`` in RWKV's own directories; ranks are examples, because its versions differ in them."""


@pytest.fixture(scope="module")
def tokens(random_tokens) -> list[int]:
    return random_tokens(N_TOKENS)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return family_model(tmp_path_factory.mktemp("file"), "rwkv7")


@pytest.fixture(scope="module")
def reference(path) -> dict[str, torch.Tensor]:
    return reference_tensors(path)


@pytest.fixture
def folder(tmp_path, reference) -> Path:
    return write_directory(tmp_path / "hf", directory_tensors(reference))


@pytest.fixture
def plain(tmp_path, reference) -> Path:
    return write_plain_directory(tmp_path / "plain", plain_tensors(reference))


@pytest.mark.parametrize("unread", [False, True])
def test_a_plain_directory_equals_the_gguf_file(tmp_path, path, reference, unread):
    unused = {f"blocks.0.att.v{i}": torch.ones(2, 3) for i in range(3)}
    tensors = plain_tensors({**reference, **unused}, unread=unread)
    folder = write_plain_directory(tmp_path / "plain", tensors)
    with Checkpoint(folder) as directory, GgufFile.open(path) as file:
        used = {name for name, tensor in read_spec(file).tensors() if tensor.used and name in file.tensors}
        assert directory.tensors.keys() == used
        for name in used:
            assert directory.tensors[name].shape == file.tensors[name].shape, name
            assert directory.tensor_data(name).tobytes() == file.tensor_data(name).tobytes(), f"{name} differs"
        assert read_spec(directory) == read_spec(file)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_a_plain_directory_equal_the_reference(tmp_path, reference, tier, load, tokens, assert_close, tied):
    tensors = {**reference, "head.weight": reference["emb.weight"]} if tied else reference
    folder = write_plain_directory(tmp_path / "plain", plain_tensors(tensors), tie_word_embeddings=tied)
    expected = reference_logits(tmp_path, tensors, tokens)
    with load(folder, tier).new_context(OPTIONS) as context:
        assert_close(native_logits(context, tokens, [N_TOKENS // 2] + [1] * (N_TOKENS // 2)), expected, BOUND)


def test_a_plain_directory_has_the_world_vocabulary(plain):
    with slm.load(plain, backend="native") as model:
        text, ids = "a\n\n", [98, 261]
        assert model.vocab.encode(f"{text}{END}", add_special=True, parse_special=True) == [*ids, 0]
        assert model.vocab.encode(text, add_special=True, parse_special=False) == ids
        assert 0 not in model.vocab.encode(END, add_special=True, parse_special=False)
        assert model.vocab.eog_ids == {0, 261}


def test_bos_token_is_empty_in_templates_if_settings_name_none(plain):
    """transformers passes only the tokens that the settings name to the template."""
    (plain / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (plain / "chat_template.jinja").write_text("{{ bos_token }}User: {{ messages[0].content }}{{ eos_token }}")
    with slm.load(plain, backend="native") as model:
        segments = model.formatter.render([slm.Message("user", "hi")], tools=(), add_generation_prompt=True)
        assert "".join(segment.text for segment in segments) == f"User: hi{END}"


@pytest.mark.parametrize("key", PLAIN)
def test_missing_keys_of_plain_directories_have_the_default_of_the_class(key):
    config = {"architectures": ["Rwkv7ForCausalLM"], **PLAIN}
    less = {name: value for name, value in config.items() if name != key}
    if key.endswith("_low_rank_dim"):
        with pytest.raises(UnsupportedModel, match=f"'{key}' is missing"):
            parsed(less)
    else:
        assert parsed(less) == parsed(config)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"use_deep_embed": True}, UnsupportedModel, "'use_deep_embed' is True"),
        ({"norm_bias": False}, UnsupportedModel, "'norm_bias' is False"),
        ({"num_heads": 4}, UnsupportedModel, "'num_heads' is 4.*accepted: 3"),
        ({"norm_eps": 1e-6}, UnsupportedModel, "'head_dim' times 'norm_eps' is .*0.00064"),
        ({"gate_low_rank_dim": None}, UnsupportedModel, "'gate_low_rank_dim' is missing"),
        ({"a_low_rank_dim": 32}, InvalidModelFile, "time_mix_a1.weight.*shape"),
        ({"num_hidden_layers": 4}, InvalidModelFile, r"rwkv7\.blocks\.3.*is missing"),
        ({"num_hidden_layers": 2}, UnsupportedModel, r"rwkv7\.blocks\.2.*unknown for rwkv7 models"),
        ({"hidden_act": "sqrelu"}, UnsupportedModel, "'hidden_act' is 'sqrelu', which is unknown here"),
        ({"head_size": 64}, UnsupportedModel, "'head_size' is 64, which is unknown here"),
        ({"architectures": ["RWKV7ForCausalLM"]}, UnsupportedModel, "'wkv_state_dtype' is 'float32', which is unknown"),
    ],
)
def test_wrong_configurations_of_plain_directories_are_refused(plain, load, config, error, message):
    change_config(plain, lambda old: old | config)
    with pytest.raises(error, match=message) as raised:
        load(plain)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("packed", [False, True])
def test_a_directory_equals_the_gguf_file(tmp_path, path, reference, packed):
    """Published directories store the shares as six tensors or as one, and block 0 without or with unused tensors."""
    folder = write_directory(tmp_path / "hf", directory_tensors(reference, packed=packed))
    with Checkpoint(folder) as directory, GgufFile.open(path) as file:
        used = {name for name, tensor in read_spec(file).tensors() if tensor.used and name in file.tensors}
        assert directory.tensors.keys() == used
        for name in used:
            assert directory.tensors[name].shape == file.tensors[name].shape, name
            assert directory.tensor_data(name).tobytes() == file.tensor_data(name).tobytes(), f"{name} differs"
        assert read_spec(directory) == read_spec(file)


def test_files_store_the_share_of_channel_mixing_as_a_vector():
    """llama.cpp's converter squeezes dimensions of 1, except in stacked tensors."""
    shapes = family_tensors("rwkv7")
    assert shapes["blk.0.channel_mix_lerp_k.weight"] == (192,)
    assert shapes["blk.0.time_mix_lerp_fused.weight"] == (6, 1, 1, 192)


def test_logits_of_a_directory_equal_the_reference(tmp_path, reference, folder, tier, load, tokens, assert_close):
    expected = reference_logits(tmp_path, reference, tokens)
    model = load(folder, tier)
    assert model.info.n_ctx_train == 1 << 20, "the value of converted files: a recurrent state has no limit"
    with model.new_context(OPTIONS) as context:
        assert_close(native_logits(context, tokens, [N_TOKENS // 2] + [1] * (N_TOKENS // 2)), expected, BOUND)


def test_tied_embeddings_are_supported(tmp_path, reference, load, tokens, assert_close):
    tied = {**reference, "head.weight": reference["emb.weight"]}
    folder = write_directory(tmp_path / "hf", directory_tensors(tied), tie_word_embeddings=True)
    change_tensors(folder, lambda tensors: {name: each for name, each in tensors.items() if name != "lm_head.weight"})
    with load(folder).new_context(OPTIONS) as context:
        logits = native_logits(context, tokens, [N_TOKENS])
    assert_close(logits, reference_logits(tmp_path, tied, tokens), BOUND)


def test_bf16_weights_are_supported(tmp_path, reference, load, tokens, assert_close):
    half = {name: values.to(torch.bfloat16) for name, values in reference.items()}
    folder = write_directory(tmp_path / "hf", directory_tensors(half))
    expected = reference_logits(tmp_path, {name: values.float() for name, values in half.items()}, tokens)
    with load(folder).new_context(OPTIONS) as context:
        assert_close(native_logits(context, tokens, [N_TOKENS]), expected, BOUND)


def parsed(config: dict[str, Any]) -> tuple[Any, ...]:
    """Everything that is derived from a configuration."""
    recipe = recipe_of(Config(Path("config.json"), {"model_type": "rwkv7", **config}))
    return recipe.architecture, dict(recipe.metadata), recipe.model, list(recipe.blocks), recipe.unused


@pytest.mark.parametrize("key", DEFAULTS)
def test_missing_keys_have_the_default_of_the_class(key):
    sizes = {"hidden_size": 192, "num_hidden_layers": 2, "intermediate_size": 160, "value_dim": 192}
    config = DEFAULTS | {name: value for name, value in sizes.items() if name != key}
    if key == "hidden_size":
        config["value_dim"] = None
    assert parsed({name: value for name, value in config.items() if name != key}) == parsed(config)


@pytest.mark.parametrize(
    ("config", "n_ff"),
    [({}, 768), ({"hidden_ratio": 3.3}, 640), ({"hidden_ratio": None}, 768), ({"intermediate_size": 160}, 160)],
)
def test_the_default_width_of_channel_mixing(config, n_ff):
    """For a width of 192: int(192 * 3.3) is 633, and the next multiple of 32 is 640."""
    assert parsed({"hidden_size": 192, **config})[1]["feed_forward_length"] == n_ff


@pytest.mark.parametrize(
    "config",
    [
        {"attn_mode": "fused_recurrent"},
        {"fuse_norm": True},
        {"fuse_linear_cross_entropy": False, "use_l2warp": False},
        {"head_dim": None, "num_heads": 3},
        {"num_heads": None},
        {"value_dim": 192},
        {"value_dim": None},
        {"intermediate_size": None, "hidden_ratio": 160 / 192},
    ],
)
def test_neutral_keys_are_accepted(folder, config):
    with Checkpoint(folder) as directory:
        expected = read_spec(directory)
    change_config(folder, lambda old: old | config)
    with Checkpoint(folder) as directory:
        assert read_spec(directory) == expected


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"attn": {"layers": [1], "num_heads": 3}}, UnsupportedModel, "'attn' is .*not implemented"),
        ({"hidden_act": "relu"}, UnsupportedModel, "'hidden_act' is 'relu'.*'sqrelu'"),
        ({"norm_first": False}, UnsupportedModel, "'norm_first' is False"),
        ({"norm_bias": False}, UnsupportedModel, "'norm_bias' is False"),
        ({"value_dim": 384}, UnsupportedModel, "'value_dim' is 384"),
        ({"value_dim": [192, 384, 192]}, UnsupportedModel, "'value_dim' is "),
        ({"norm_eps": 1e-6}, UnsupportedModel, "'head_dim' times 'norm_eps' is .*0.00064"),
        ({"head_dim": 32}, UnsupportedModel, "'head_dim' times 'norm_eps' is .*0.00064"),
        ({"head_dim": None, "num_heads": None}, UnsupportedModel, "'num_heads' is missing"),
        ({"head_dim": 128, "norm_eps": 5e-6}, InvalidModelFile, "heads of 128 do not fill 192"),
        ({"a_low_rank_dim": None}, UnsupportedModel, "'a_low_rank_dim' is null"),
        ({"a_low_rank_dim": 32}, InvalidModelFile, "time_mix_a1.weight.*shape"),
        ({"hidden_ratio": 2, "intermediate_size": None}, InvalidModelFile, "channel_mix_key.weight.*shape"),
        ({"hidden_ratio": -1e30, "intermediate_size": None}, InvalidModelFile, "channel_mix_key.weight.*shape"),
        ({"hidden_ratio": 1e30, "intermediate_size": None}, InvalidModelFile, "intermediate_size"),
        ({"num_hidden_layers": 4, "value_dim": None}, InvalidModelFile, r"layers\.3.*is missing"),
        ({"num_hidden_layers": 2, "value_dim": None}, UnsupportedModel, r"layers\.2.*unknown for rwkv7 models"),
        ({"hidden_size": 128, "value_dim": None}, InvalidModelFile, "shape"),
        ({"head_size": 64}, UnsupportedModel, "'head_size' is 64, which is unknown here"),
        ({"vocab_size": 3, "abacus": 1}, UnsupportedModel, "'abacus'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, UnsupportedModel, "aqlm"),
    ],
)
def test_wrong_configurations_are_refused(folder, load, config, error, message):
    change_config(folder, lambda old: old | config)
    with pytest.raises(error, match=message) as raised:
        load(folder)
    assert "\n" not in str(raised.value)


def test_wrong_shapes_of_shares_are_refused(folder, load):
    change_tensors(folder, lambda tensors: {**tensors, "model.layers.1.attn.x_w": torch.ones(1, 1, 191)})
    with pytest.raises(UnsupportedModel, match=r"attn\.x_r' differ in shape"):
        load(folder)
    shares = {f"model.layers.1.attn.x_{letter}": torch.ones(5) for letter in "rwkvag"}
    change_tensors(folder, lambda tensors: {**tensors, **shares})
    with pytest.raises(InvalidModelFile, match=r"time_mix_lerp_fused.weight' has the shape \(6, 1, 1, 5\)"):
        load(folder)
    packed = {"model.layers.1.attn.x_x": torch.ones(7, 11)}
    change_tensors(
        folder, lambda tensors: {name: each for name, each in tensors.items() if name not in shares} | packed
    )
    with pytest.raises(InvalidModelFile, match=r"attn.x_x' has the shape \(7, 11\): no 6 parts"):
        load(folder)


def test_shares_in_both_forms_are_refused(folder, load):
    change_tensors(folder, lambda tensors: {**tensors, "model.layers.1.attn.x_x": torch.ones(6, 1, 1, 192)})
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.attn\.x_"):
        load(folder)


def test_a_directory_without_a_vocabulary_has_no_texts(folder, load):
    (folder / VOCABULARY.name).unlink()
    with load(folder) as model, pytest.raises(VocabError, match=r"there is no tokenizer\.json.*make one"):
        model.vocab.encode("a", add_special=False, parse_special=False)


def test_the_fingerprint_depends_on_the_vocabulary(folder):
    with Checkpoint(folder) as directory:
        before = directory.fingerprint()
    vocabulary = folder / VOCABULARY.name
    vocabulary.write_text(vocabulary.read_text(encoding="utf-8").replace("304 ", "303 ", 1), encoding="utf-8")
    with Checkpoint(folder) as directory:
        assert directory.fingerprint() != before


def test_chats_use_the_template_and_end_at_an_empty_line(folder):
    """The template begins with the text of token 0, as published templates do."""
    end = "<|rwkv_tokenizer_end_of_text|>"
    template = "{{ bos_token }}{% for m in messages %}User: {{ m.content }}\n\n{% endfor %}Assistant:"
    settings = {
        "added_tokens_decoder": {"0": {"content": end, "special": True}},
        "bos_token": end,
        "eos_token": "\n\n",
        "chat_template": template,
        "tokenizer_class": "RwkvTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with slm.load(folder, backend="native") as model:
        assert "tokenizer_config.json" in model.info.formatter
        segments = model.formatter.render([slm.Message("user", "hi")], tools=(), add_generation_prompt=True)
        text = "".join(segment.text for segment in segments)
        assert text == f"{end}User: hi\n\nAssistant:"
        ids = model.vocab.encode(text, add_special=False, parse_special=True)
        assert ids[0] == 0
        assert model.vocab.eog_ids == {0, 261}
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with slm.load(folder, backend="native") as model:
        assert model.info.formatter.startswith("rwkv_world")
