"""Directories of transformers models against transformers and against GGUF files of the same weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from transformers.integrations.mxfp4 import dequantize_convertops

import slm_core as slm
from native.architectures.cases import CASES, TEXT_ONLY
from native.architectures.checkpoints import change_config, change_tensors, save_directory
from native.architectures.engines import Subject, make_subject, native_logits, transformers_logits
from native.architectures.exported import export, with_vocabulary
from native.exact import exact
from slm_core.architectures import read_spec
from slm_core.checkpoints import Checkpoint, family_names
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.quant import dequantize
from slm_core.quantizing import quantize_model

N_TOKENS = 60  # longer than the sliding windows of the families
BOUND = 1e-4  # clause 9 of the contract: float32, relative
OPTIONS = exact(n_ctx=N_TOKENS, n_batch=N_TOKENS)
COMPUTED_TABLES = {"rope_freqs.weight": 2**-22}
"""Relative tolerances of tables that both sides compute in float32: a half and one rounding."""
FAMILIES_WITH_DIRECTORIES = [
    name
    for name, case in CASES.items()
    if not isinstance(case, str)
    and TEXT_ONLY not in case.note
    and getattr(transformers, case.config).model_type in family_names()
]
"""Families that can be loaded from directories."""


REMOTE_CODE_FAMILIES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "internlm2": (
        "llama",
        {
            r"embed_tokens": "tok_embeddings",
            r"^lm_head": "output",
            r"self_attn\.o_proj": "attention.wo",
            r"input_layernorm": "attention_norm",
            r"post_attention_layernorm": "ffn_norm",
            r"mlp\.gate_proj": "feed_forward.w1",
            r"mlp\.up_proj": "feed_forward.w3",
            r"mlp\.down_proj": "feed_forward.w2",
        },
        {"bias": False, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ),
    "minicpm": (
        "granite",
        {},
        {"scale_emb": 3.0, "scale_depth": 0.4 * 3**0.5, "dim_model_base": 144, "rope_theta": 1e4},
    ),
    "exaone": (
        "qwen2",  # its biases are set to 0
        {
            r"model\.embed_tokens": "transformer.wte",
            r"model\.layers": "transformer.h",
            r"model\.norm": "transformer.ln_f",
            r"self_attn\.o_proj": "attn.attention.out_proj",
            r"self_attn": "attn.attention",
            r"input_layernorm": "ln_1",
            r"post_attention_layernorm": "ln_2",
            r"mlp\.gate_proj": "mlp.c_fc_0",
            r"mlp\.up_proj": "mlp.c_fc_1",
            r"mlp\.down_proj": "mlp.c_proj",
        },
        {"num_layers": 3, "layer_norm_epsilon": 1e-5, "activation_function": "silu", "rope_theta": 1e4},
    ),
}
"""Families without a class in transformers: an equivalent class, the names of tensors, keys of configurations."""


class Saved(NamedTuple):
    """A family's file and model, and the directory of the model."""

    family: str
    subject: Subject
    folder: Path


@pytest.fixture(scope="module")
def tokens(random_tokens) -> list[int]:
    return random_tokens(N_TOKENS)


@pytest.fixture(scope="module", params=FAMILIES_WITH_DIRECTORIES)
def saved(request, tmp_path_factory) -> Saved:
    folder = tmp_path_factory.mktemp("family")
    subject = make_subject(folder, request.param)
    return Saved(request.param, subject, save_directory(subject.model, folder / "hf"))


@pytest.fixture
def llama(tmp_path) -> Saved:
    subject = make_subject(tmp_path, "llama")
    return Saved("llama", subject, save_directory(subject.model, tmp_path / "hf"))


def test_a_directory_equals_the_gguf_file(saved):
    """The same tensors and the same spec, so that the same forward pass gives the same logits."""
    with Checkpoint(saved.folder) as directory, GgufFile.open(saved.subject.path) as file:
        used = {name for name, tensor in read_spec(file).tensors() if tensor.used and name in file.tensors}
        assert directory.tensors.keys() == used
        for name in used:
            actual, expected = directory.tensor_data(name), file.tensor_data(name)
            if name in COMPUTED_TABLES:
                np.testing.assert_allclose(
                    actual.view(np.float32), expected.view(np.float32), rtol=COMPUTED_TABLES[name]
                )
            else:
                assert directory.tensors[name].shape == file.tensors[name].shape
                assert actual.tobytes() == expected.tobytes(), f"{name} differs"
        assert read_spec(directory) == read_spec(file)


def test_a_directory_becomes_the_gguf_file(saved, tmp_path, tokens):
    """Tensors have the same bytes, and llama.cpp computes the same logits of both files, bit for bit without tables."""
    path = export(with_vocabulary(saved.folder, tmp_path / "hf"), tmp_path / "exported.gguf")
    with GgufFile.open(path) as exported, GgufFile.open(saved.subject.path) as file:
        for name, tensor in exported.tensors.items():
            assert (tensor.shape, tensor.ggml_type) == (file.tensors[name].shape, file.tensors[name].ggml_type)
            if name not in COMPUTED_TABLES:
                assert exported.tensor_data(name).tobytes() == file.tensor_data(name).tobytes(), name
        assert read_spec(exported) == read_spec(file)
        missing, has_tables = (
            file.tensors.keys() - exported.tensors.keys(),
            COMPUTED_TABLES.keys() & exported.tensors.keys(),
        )
    if not missing and saved.family != "phimoe":  # llama.cpp requires what is missing, and llamacpp refuses phimoe
        n = 48 if saved.family == "phi3_window" else N_TOKENS  # llamacpp refuses longer sequences
        actual, expected = (_llama_cpp_logits(each, tokens[:n]) for each in (path, saved.subject.path))
        assert np.abs(actual - expected).max() <= (1e-5 * np.abs(expected).max() if has_tables else 0)


def _llama_cpp_logits(path: Path, tokens: list[int]) -> np.ndarray:
    with slm.load(path, backend="llamacpp") as model, model.model.new_context(OPTIONS) as context:
        return native_logits(context, tokens, [len(tokens)])


def test_unread_tensors_of_shared_kv_layers_are_exported(tmp_path):
    """Published directories have them, and llama.cpp requires them."""
    subject = make_subject(tmp_path, "gemma3n")
    folder = with_vocabulary(save_directory(subject.model, tmp_path / "hf"), tmp_path / "vocab")
    (folder / "model.safetensors").unlink()
    shutil.copy(tmp_path / "hf" / "model.safetensors", folder)
    theirs = {"attn_k.weight": "k_proj", "attn_v.weight": "v_proj", "attn_k_norm.weight": "k_norm"}
    with GgufFile.open(subject.path) as file:
        declared = read_spec(file).tensors()
        unread = [name for name, tensor in declared if not tensor.used and name in file.tensors]
        values = {name: file.tensor_data(name).view(np.float32).reshape(file.tensors[name].shape) for name in unread}
    added = {
        f"model.layers.{layer}.self_attn.{theirs[name]}.weight": torch.tensor(values[f"blk.{layer}.{name}"])
        for _, layer, name in (each.split(".", 2) for each in unread)
    }
    assert added
    change_tensors(folder, lambda tensors: {**tensors, **added})
    path = export(folder, tmp_path / "exported.gguf")
    with GgufFile.open(path) as exported, GgufFile.open(subject.path) as file:
        assert exported.tensors.keys() == file.tensors.keys()
    tokens = list(range(5, 25))
    assert np.array_equal(_llama_cpp_logits(path, tokens), _llama_cpp_logits(subject.path, tokens))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exported_matrices_keep_their_type_and_the_rest_is_f32(tmp_path, llama, load, tokens, dtype):
    model = llama.subject.model
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    folder = with_vocabulary(save_directory(model, tmp_path / "half"), tmp_path / "vocab")
    path = export(folder, tmp_path / "half.gguf")
    kind, file_type = ("BF16", 32) if dtype == torch.bfloat16 else ("F16", 1)
    with GgufFile.open(path) as file:
        types = {name: tensor.ggml_type.name for name, tensor in file.tensors.items()}
        assert file.require("general.file_type", int) == file_type
    assert types["blk.0.ffn_up.weight"] == types["token_embd.weight"] == kind
    assert types["blk.0.attn_norm.weight"] == types["output_norm.weight"] == "F32"
    rows = []
    for source in (folder, path):
        with load(source).new_context(OPTIONS) as context:
            rows.append(native_logits(context, tokens, [N_TOKENS]))
    assert np.array_equal(*rows)
    assert np.abs(_llama_cpp_logits(path, tokens) - rows[0]).max() < 2e-2 * np.abs(rows[0]).max()


def test_a_quantized_directory_is_its_quantized_gguf_file(tmp_path, llama):
    folder = with_vocabulary(llama.folder, tmp_path / "vocab")
    export(folder, tmp_path / "whole.gguf")
    for source, target in ((tmp_path / "whole.gguf", "of-file"), (folder, "of-directory")):
        quantize_model(source, tmp_path / target, "Q4_K_M")
    assert (tmp_path / "of-directory").read_bytes() == (tmp_path / "of-file").read_bytes()


def test_logits_of_a_directory_equal_transformers(saved, load, tokens, assert_close):
    expected = transformers_logits(saved.subject.model, tokens)
    with load(saved.folder).new_context(OPTIONS) as context:
        assert_close(native_logits(context, tokens, [N_TOKENS]), expected, BOUND)


@pytest.mark.parametrize("kind", REMOTE_CODE_FAMILIES)
def test_families_with_remote_code(tmp_path, load, tokens, assert_close, kind):
    """The directories have published names and keys; the oracle is an equivalent class of transformers."""
    family, names, stated = REMOTE_CODE_FAMILIES[kind]
    model = make_subject(tmp_path, family).model
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    if kind == "minicpm":
        model.config.attention_multiplier = 0.25
        for layer in model.model.layers:
            layer.self_attn.scaling = 0.25
    folder = save_directory(model, tmp_path / "hf")
    change_tensors(folder, lambda tensors: _renamed_tensors(kind, tensors, names))
    keep = "hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers vocab_size"
    keep += " num_key_value_heads rms_norm_eps tie_word_embeddings head_dim" if kind != "exaone" else " head_dim"
    known = {*keep.split(), "num_key_value_heads"}
    change_config(
        folder,
        lambda had: {key: value for key, value in had.items() if key in known} | stated | {"model_type": kind},
    )
    expected = transformers_logits(model, tokens)
    with load(folder).new_context(OPTIONS) as context:
        assert_close(native_logits(context, tokens, [N_TOKENS]), expected, BOUND)


def _renamed_tensors(kind: str, state_dict: dict[str, torch.Tensor], names: dict[str, str]) -> dict[str, torch.Tensor]:
    tensors = {name: tensor for name, tensor in state_dict.items() if not name.endswith("bias")}
    if kind == "internlm2":
        for i in range(3):
            parts = [tensors.pop(f"model.layers.{i}.self_attn.{name}_proj.weight") for name in "qkv"]
            heads = [part.reshape(3, -1, 16, part.shape[1]) for part in parts]  # [groups, heads, rows, width]
            tensors[f"model.layers.{i}.attention.wqkv.weight"] = torch.cat(heads, 1).flatten(0, 2)
    for pattern, replacement in names.items():
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    return tensors


def test_every_kind_of_directory_is_tested():
    """Other tests cover vision-language models, RWKV-7 and encoders."""
    kinds = {getattr(transformers, CASES[name].config).model_type for name in FAMILIES_WITH_DIRECTORIES}
    images = {"gemma3", "gemma3n", "gemma4", "llama4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}
    tested_elsewhere = images | {"bert", "modernbert", "nomic_bert", "roberta", "rwkv7", "xlm-roberta"}
    assert set(family_names()) - kinds == tested_elsewhere | REMOTE_CODE_FAMILIES.keys()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_not_converted(tmp_path, llama, tier, load, tokens, assert_close, dtype):
    """16-bit weights are exact in float32, and all tiers compute products of few rows with them in float32."""
    model = llama.subject.model
    for parameter in model.parameters():  # not the buffers: RoPE stays in float32
        parameter.data = parameter.data.to(dtype)
    folder = save_directory(model, tmp_path / "half")
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    with Checkpoint(folder) as directory:
        kind = "BF16" if dtype == torch.bfloat16 else "F16"
        assert directory.tensors["blk.0.ffn_up.weight"].ggml_type.name == kind
    with load(folder, tier).new_context(OPTIONS) as context:
        logits = native_logits(context, tokens, [6] * (N_TOKENS // 6))
    assert_close(logits, transformers_logits(model, tokens), BOUND)


@pytest.mark.parametrize("per", ["matrix", "row", "block"])
def test_fp8_weights_are_read_with_their_scales(tmp_path, llama, load, tokens, assert_close, per):
    """The oracle is torch's fp8 type. Both sides round the product of code and scale to BF16."""
    model, folder = llama.subject.model, llama.folder
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        packed[name] = tensor.clone()
        if "proj" in name:
            codes, scales = _fp8(tensor, per)
            wide = scales
            if per == "block":
                wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(tensor), : tensor.shape[1]]
            tensor.copy_((codes.float() * wide).bfloat16().float())
            packed[name], packed[f"{name}_scale{'_inv' * (per == 'block')}"] = codes, scales
            packed[name.replace("weight", "input_scale")] = torch.ones(1)
    change_tensors(folder, lambda _: packed)
    change_config(folder, lambda stated: {**stated, "quantization_config": _quantization_config(per)})
    expected = transformers_logits(model, tokens)
    with load(folder).new_context(OPTIONS) as context:
        assert_close(native_logits(context, tokens, [N_TOKENS]), expected, BOUND)


def _fp8(tensor: torch.Tensor, per: str) -> tuple[torch.Tensor, torch.Tensor]:
    if per == "matrix":
        scales = tensor.abs().max().reshape(1) / 448
        wide = scales
    elif per == "row":
        wide = scales = tensor.abs().amax(1, keepdim=True) / 448
    else:
        rows, columns = -(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)
        scales = torch.rand(rows, columns) / 100 + 0.005
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(tensor), : tensor.shape[1]]
    return (tensor / wide).to(torch.float8_e4m3fn), scales


def _quantization_config(per: str) -> dict[str, object]:
    if per == "block":
        return {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "ignore": ["lm_head"],
    }


def test_mxfp4_weights_are_not_converted(tmp_path, load, tokens, assert_close):
    """The oracle is the dequantization of transformers."""
    subject = make_subject(tmp_path, "gpt_oss")
    model, folder = subject.model, save_directory(subject.model, tmp_path / "hf")
    generator, packed = torch.Generator().manual_seed(3), {}
    for name, tensor in model.state_dict().items():
        packed[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            shape = (len(tensor), tensor.shape[2], tensor.shape[1] // 32)  # rows are outputs
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
            tensor.copy_(dequantize_convertops(blocks, scales, torch.float32))
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    change_tensors(folder, lambda _: packed)
    about = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    change_config(folder, lambda stated: {**stated, "quantization_config": about})
    with Checkpoint(folder) as directory:
        gates = directory.tensors["blk.0.ffn_gate_exps.weight"]
        assert (gates.ggml_type.name, gates.shape) == ("MXFP4", (7, 160, 288))
        dequantized = dequantize(directory.tensor_data(gates.name), gates.ggml_type, gates.shape)
        expected = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"][:, :, ::2].swapaxes(1, 2)
        assert (dequantized == expected.numpy()).all()
    with load(folder).new_context(OPTIONS) as context:
        logits = native_logits(context, tokens, [N_TOKENS])
    assert_close(logits, transformers_logits(model, tokens), BOUND)
    exported = export(with_vocabulary(folder, tmp_path / "vocab"), tmp_path / "exported.gguf")
    with GgufFile.open(exported) as file:
        assert file.tensors[gates.name].ggml_type.name == "MXFP4"
    theirs = _llama_cpp_logits(exported, tokens)
    assert np.linalg.norm(theirs - logits) < 0.1 * np.linalg.norm(logits)  # llama.cpp rounds activations to 8 bits
    change_tensors(
        folder, lambda had: {name: each for name, each in had.items() if "0.mlp.experts.down_proj_s" not in name}
    )
    with pytest.raises(InvalidModelFile, match="down_proj_scales' is missing"):
        Checkpoint(folder)


def test_yarn_without_truncation(tmp_path, load, tokens, assert_close):
    """GGUF has no key for it, so slm-core adds one. Truncation changes the ramp, and so the logits."""
    model = make_subject(tmp_path, "gpt_oss").model
    model.config.rope_parameters = {
        **model.config.rope_parameters,
        "truncate": False,
    }  # a copy: other models share the dictionary
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    folder = save_directory(model, tmp_path / "hf")
    expected = transformers_logits(model, tokens)
    with load(folder).new_context(OPTIONS) as context:
        assert_close(native_logits(context, tokens, [N_TOKENS]), expected, BOUND)
    change_config(folder, lambda stated: {**stated, "rope_parameters": stated["rope_parameters"] | {"truncate": True}})
    with load(folder).new_context(OPTIONS) as context:
        truncated = native_logits(context, tokens, [N_TOKENS])
    assert np.linalg.norm(truncated - expected) > 10 * BOUND * np.linalg.norm(expected)


def test_the_two_epsilons_of_falcon_mamba(tmp_path, load, tokens, assert_close):
    model = make_subject(tmp_path, "falcon_mamba").model
    model.config.mixer_rms_eps = 0.5
    for layer in model.backbone.layers:
        for norm in (layer.mixer.dt_layernorm, layer.mixer.b_layernorm, layer.mixer.c_layernorm):
            norm.eps = 0.5
        layer.mixer.rms_eps = 0.5
    folder = save_directory(model, tmp_path / "hf")
    with load(folder).new_context(OPTIONS) as context:
        logits = native_logits(context, tokens, [N_TOKENS])
    assert_close(logits, transformers_logits(model, tokens), BOUND)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_unread_tensors_of_shared_kv_layers_are_accepted(tmp_path, family):
    """Published directories have keys and values for layers with shared KV; transformers does not save them."""
    subject = make_subject(tmp_path, family)
    folder = save_directory(subject.model, tmp_path / "hf")
    last = f"model.layers.{subject.model.config.num_hidden_layers - 1}.self_attn"
    unread = {f"{last}.{name}.weight": torch.ones(2, 3) for name in ("k_proj", "v_proj", "k_norm")}
    change_tensors(folder, lambda tensors: {**tensors, **unread})
    with Checkpoint(folder) as directory, GgufFile.open(subject.path) as file:
        assert read_spec(directory) == read_spec(file)
    change_tensors(folder, lambda tensors: {**tensors, "model.layers.0.self_attn.qk_norm.weight": torch.ones(2)})
    with pytest.raises(UnsupportedModel, match="qk_norm"):
        Checkpoint(folder)


@pytest.mark.parametrize("n_ctx", [64, 16, 12])
def test_the_sliding_window_of_the_first_mistral(tmp_path, load, tokens, assert_close, n_ctx):
    """The window also counts if it is as long as the declared context, or longer: contexts may be longer than that."""
    subject = make_subject(tmp_path, "mistral")
    subject.model.config.sliding_window, subject.model.config.max_position_embeddings = 16, n_ctx
    folder = save_directory(subject.model, tmp_path / "hf")
    with load(folder).new_context(OPTIONS) as context:
        logits = native_logits(context, tokens, [N_TOKENS])
    assert_close(logits, transformers_logits(subject.model, tokens), BOUND)


def test_shards_are_loaded_as_one_model(llama, tmp_path, load, tokens):
    sharded = save_directory(llama.subject.model, tmp_path / "shards", max_shard_size="1MB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    rows = []
    for folder in (llama.folder, sharded):
        with load(folder).new_context(OPTIONS) as context:
            rows.append(native_logits(context, tokens, [N_TOKENS]))
    assert (rows[0] == rows[1]).all()
    with Checkpoint(llama.folder) as one, Checkpoint(sharded) as several:
        assert one.fingerprint() == several.fingerprint(), "the fingerprint must not depend on the shards"
    change_tensors(llama.folder, lambda tensors: {**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1})
    with Checkpoint(llama.folder) as one, Checkpoint(sharded) as several:
        assert one.fingerprint() != several.fingerprint()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 1e4}, {}),
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        ),
    ],
)
def test_old_and_new_rope_configurations_mean_the_same(llama, old, new):
    specs = []
    for stated_rope in (old, new):
        change_config(
            llama.folder,
            lambda stated, rope=stated_rope: {k: v for k, v in stated.items() if not k.startswith("rope")} | rope,
        )
        with Checkpoint(llama.folder) as directory:
            specs.append(read_spec(directory))
    assert specs[0] == specs[1]


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("hidden_act", "gelu", UnsupportedModel, "'hidden_act' is 'gelu'.*accepted: 'silu'"),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, UnsupportedModel, "'dynamic'"),
        ("abacus", 7, UnsupportedModel, "'abacus' is 7.*unknown"),
        ("model_type", "abacus", UnsupportedModel, "'abacus'.*llama"),
        ("architectures", ["LlamaForSequenceClassification"], UnsupportedModel, "does not generate"),
        ("quantization_config", {"quant_method": "bitsandbytes"}, UnsupportedModel, "bitsandbytes.*GGUF"),
        ("num_hidden_layers", 2, UnsupportedModel, r"layers\.2.*unknown for llama models"),
        ("num_hidden_layers", 4, InvalidModelFile, r"layers\.3.*is missing"),
        ("num_hidden_layers", 2**31 - 1, InvalidModelFile, "block_count|num_hidden_layers"),
        ("num_hidden_layers", True, InvalidModelFile, "integer"),
        ("num_attention_heads", 7, InvalidModelFile, "q_proj|head"),
        ("hidden_size", 287, InvalidModelFile, "shape"),
        ("rms_norm_eps", "x", InvalidModelFile, "a number"),
        ("rms_norm_eps", 1e300, InvalidModelFile, "a number up to"),
        ("tie_word_embeddings", 1, InvalidModelFile, "true or false"),
        ("attention_bias", True, InvalidModelFile, "proj.bias.*is missing"),
        ("rope_scaling", 3, InvalidModelFile, "an object"),
        ("eos_token_id", "x", InvalidModelFile, "accepted: tokens"),
    ],
)
def test_wrong_configurations_are_refused(llama, key, value, error, message, load):
    def change(stated):
        without = {k: v for k, v in stated.items() if not (key == "rope_scaling" and k == "rope_parameters")}
        return {**without, key: value}

    change_config(llama.folder, change)
    with pytest.raises(error, match=message) as raised:
        load(llama.folder)
    assert "\n" not in str(raised.value)


def test_unknown_and_missing_tensors_are_named(llama, load):
    change_tensors(llama.folder, lambda tensors: {**tensors, "model.layers.0.abacus.weight": torch.ones(3)})
    with pytest.raises(UnsupportedModel, match="abacus"):
        load(llama.folder)
    change_tensors(
        llama.folder, lambda tensors: {k: v for k, v in tensors.items() if "abacus" not in k and "lm_head" not in k}
    )
    with pytest.raises(InvalidModelFile, match=r"lm_head\.weight"):
        load(llama.folder)


def test_a_stored_output_matrix_is_ignored_if_tied(llama, load):
    change_config(llama.folder, lambda stated: {**stated, "tie_word_embeddings": True})
    with Checkpoint(llama.folder) as directory:
        assert "output.weight" not in directory.tensors


def test_the_page_lists_every_model_type():
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    listed = re.search(r"- `model_type`: (.*?)\.\n", page, re.DOTALL)
    assert listed is not None
    assert re.findall(r"`([\w-]+)`", listed[1]) == family_names()


def test_chats_use_the_template_of_the_directory(llama):
    (llama.folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    (llama.folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "another"}))
    with slm.load(llama.folder) as model:
        assert model.info.backend.startswith("native")
        assert "chat_template.jinja" in model.info.formatter
        segments = model.formatter.render([slm.Message("user", "hi")], tools=(), add_generation_prompt=False)
        assert "".join(segment.text for segment in segments) == "<user>hi"


def test_eog_tokens_come_from_both_configurations(llama):
    change_config(llama.folder, lambda stated: {**stated, "eos_token_id": 7})
    (llama.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    with slm.load(llama.folder, backend="native") as model:
        assert {7, 9} <= model.vocab.eog_ids
