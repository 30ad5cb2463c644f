"""The information in a model file, compared with the written metadata."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from slm_conformance.oracle.factories import CHAT_TEMPLATE, make_tiny_model
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.modelinfo import model_info
from slm_core.types import KvType


def info_of(path):
    with GgufFile.open(path) as file:
        return model_info(file, backend="some (build)", device="cpu")


@pytest.mark.parametrize(("weight_type", "name"), [("f32", "F32"), ("f16", "F16"), ("q8_0", "Q8_0")])
def test_all_fields_are_filled(tmp_path, weight_type, name):
    tiny = make_tiny_model("qwen2", weight_type)
    path = tiny.write(tmp_path / "m.gguf")
    info, reader = info_of(path), gguf.GGUFReader(path)
    assert (info.path, info.backend, info.device) == (path, "some (build)", "cpu")
    assert (info.architecture, info.name) == ("qwen2", tiny.metadata["general.name"])
    assert (info.n_layers, info.n_embd, info.n_ctx_train) == (3, 96, 2048)
    assert info.n_vocab == len(tiny.metadata["tokenizer.ggml.tokens"])
    assert info.n_params == sum(int(np.prod(tensor.shape)) for tensor in reader.tensors)
    assert info.n_bytes == sum(int(tensor.n_bytes) for tensor in reader.tensors)
    assert (info.quantization, info.chat_template) == (name, CHAT_TEMPLATE)
    assert len(info.fingerprint) == 64


@pytest.mark.parametrize(
    ("kv_type", "bytes_of_32"),
    [(KvType.F32, 128), (KvType.F16, 64), (KvType.Q8_0, 34), (KvType.Q6_0, 26), (KvType.Q5_0, 22)],
)
def test_the_state_size_depends_on_the_kv_type(tmp_path, kv_type, bytes_of_32):
    path = make_tiny_model("qwen2").write(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(path)
    widths = [int(t.shape[1]) for t in reader.tensors if t.name.endswith(("attn_k.weight", "attn_v.weight"))]
    with GgufFile.open(path) as file:
        info = model_info(file, backend="some (build)", device="cpu", kv_type=kv_type)
    assert info.state_bytes_per_token == sum(widths) * bytes_of_32 // 32
    assert info.state_bytes_per_sequence == 0


def test_the_state_size_of_an_unknown_architecture_is_unknown(tmp_path):
    tiny = make_tiny_model("llama")
    named = {key.replace("llama.", "never.", 1): value for key, value in tiny.metadata.items()}
    tiny.metadata.update(named | {"general.architecture": "never"})
    info = info_of(tiny.write(tmp_path / "m.gguf"))
    assert (info.state_bytes_per_token, info.state_bytes_per_sequence) == (None, None)


def test_optional_metadata_may_be_missing(tmp_path):
    tiny = make_tiny_model("llama")
    for key in ("general.name", "tokenizer.chat_template"):
        del tiny.metadata[key]
    info = info_of(tiny.write(tmp_path / "m.gguf"))
    assert (info.name, info.chat_template) == ("", None)


def test_a_file_with_only_a_vocabulary(tmp_path):
    tiny = make_tiny_model("llama")
    tiny.tensors.clear()
    info = info_of(tiny.write(tmp_path / "m.gguf"))
    assert (info.n_params, info.n_bytes, info.quantization) == (0, 0, "")
    assert info.n_vocab == len(tiny.metadata["tokenizer.ggml.tokens"])


def test_required_metadata_is_required(tmp_path):
    for key in ("general.architecture", "llama.block_count", "llama.embedding_length", "llama.context_length"):
        tiny = make_tiny_model("llama")
        del tiny.metadata[key]
        with pytest.raises(UnsupportedModel, match=f"'{key}' is missing"):
            info_of(tiny.write(tmp_path / "m.gguf"))
    tiny.metadata["llama.context_length"] = 0
    with pytest.raises(InvalidModelFile, match=r"'llama\.context_length' is 0 \(accepted: 1 or more\)"):
        info_of(tiny.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("kind", gguf.PoolingType)
def test_the_pooling_type_is_decoded(tmp_path, kind):
    tiny = make_tiny_model("qwen2")
    tiny.metadata["qwen2.pooling_type"] = int(kind)
    pooling = info_of(tiny.write(tmp_path / "m.gguf")).pooling
    assert pooling == (kind.name.lower() if kind.name in ("MEAN", "CLS", "LAST") else None)


@pytest.mark.parametrize("number", [5, 2**31 - 1])
def test_an_unknown_pooling_type_is_refused(tmp_path, number):
    tiny = make_tiny_model("qwen2")
    tiny.metadata["qwen2.pooling_type"] = number
    with pytest.raises(UnsupportedModel, match=f"'qwen2.pooling_type' is {number} .accepted: 0 none"):
        info_of(tiny.write(tmp_path / "m.gguf"))
