"""Headers that make llama.cpp abort the process on a failed assertion: the preflight checks refuse them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_conformance.oracle.factories import TinyModel, make_tiny_model
from slm_conformance.oracle.families import family_model, family_tensors, write_family
from slm_conformance.oracle.family_table import FAMILIES
from slm_conformance.oracle.gguf_writer import StoredTensor
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_llamacpp.backend import LlamaCppBackend
from tests.llamacpp.conftest import LoadModel
from tests.llamacpp.feeding import feed, new_context
from tests.llamacpp.models import changed_model


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("block_count", 0, "1 to 512"),
        ("block_count", 513, "1 to 512"),
        ("block_count", 2**32 - 1, "1 to 512"),
        ("nextn_predict_layers", 4, "0 to 3"),
        ("expert_count", 1025, "0 to 1024"),
        ("expert_count", 4, "1 to 4"),
        ("expert_used_count", 1, "0 to 0"),
        ("attention.layer_norm_rms_epsilon", -1.0, "a finite number from 0 on"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "a finite number from 0 on"),
        ("attention.layer_norm_rms_epsilon", float("inf"), "a finite number from 0 on"),
        ("rope.scaling.type", "bogus", "none, linear, yarn, longrope"),
        ("rope.dimension_count", 30, "32, the width of a head"),
        ("rope.dimension_count", 0, "32, the width of a head"),
        ("attention.value_length", 16, "32, the width of a head"),
    ],
)
def test_metadata(load: LoadModel, tmp_path: Path, key: str, value: Any, accepted: str) -> None:
    path = changed_model(tmp_path / "model.gguf", **{f"llama__{key.replace('.', '__')}": value})
    with pytest.raises(UnsupportedModel) as caught:
        load(path)
    message = str(caught.value)
    assert f"accepted by llama.cpp: {accepted}" in message
    assert "llama." in message
    assert "\n" not in message


def test_keys_that_only_slm_core_reads_are_refused(load: LoadModel, tmp_path: Path) -> None:
    """llama.cpp would ignore them and compute another model."""
    path = changed_model(tmp_path / "model.gguf", slm__rope__yarn_truncate=False)
    with pytest.raises(UnsupportedModel, match=r"'slm\.rope\.yarn_truncate' is not a key of GGUF"):
        load(path)


@pytest.mark.parametrize(("groups", "used"), [(4, 1), (3, 1), (2, 0), (2, 2)])
def test_expert_groups(load: LoadModel, tmp_path: Path, groups: int, used: int) -> None:
    path = changed_model(
        tmp_path / "model.gguf",
        llama__expert_count=4,
        llama__expert_used_count=2,
        llama__expert_group_count=groups,
        llama__expert_group_used_count=used,
    )
    with pytest.raises(UnsupportedModel, match="expert_group"):
        load(path)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("key", ["head_count", "key_length"])
def test_heads_that_do_not_match_their_tensors(load: LoadModel, tmp_path: Path, architecture: str, key: str) -> None:
    model = make_tiny_model(architecture)  # type: ignore[arg-type]
    changed = {f"{architecture}.attention.{key}": 2, f"{architecture}.rope.dimension_count": 2}
    if key == "head_count":
        del changed[f"{architecture}.rope.dimension_count"]
    path = TinyModel(model.shape, model.tensors, model.metadata | changed).write(tmp_path / "model.gguf")
    kind, words = (InvalidModelFile, "rows, but 2 heads") if key == "head_count" else (UnsupportedModel, "of a head")
    with pytest.raises(kind, match=words):
        load(path)


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.1.attn_norm.weight", "blk.1.attn_k.bias"])
def test_a_vector_in_16_bit(load: LoadModel, tmp_path: Path, name: str) -> None:
    model = make_tiny_model("qwen2")
    packed = StoredTensor.pack(model.tensors[name].values(), "f16")
    path = TinyModel(model.shape, model.tensors | {name: packed}, model.metadata).write(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModel, match=f"tensor '{name}' is F16"):
        load(path)


@pytest.mark.parametrize(
    ("family", "key", "value", "accepted"),
    [("jamba", "ssm.inner_size", 100, "288"), ("rwkv7", "token_shift_count", 1, "2")],
)
def test_recurrent_models(
    load: LoadModel, tmp_path: Path, monkeypatch: Any, family: str, key: str, value: int, accepted: str
) -> None:
    tensors = {
        name: StoredTensor.pack(np.ones(shape, np.float32), "f32") for name, shape in family_tensors(family).items()
    }
    family_entry = FAMILIES[family]
    monkeypatch.setitem(FAMILIES, family, replace(family_entry, metadata={**family_entry.metadata, key: value}))
    path = write_family(tmp_path / "model.gguf", family, tensors)
    with pytest.raises(UnsupportedModel, match=rf"{key}' is {value} \(accepted by llama.cpp: {accepted}\)"):
        load(path)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("gemma2", {"sliding_window_pattern": [False] * 3}, "no layer has it"),  # llama.cpp ends the process
        ("exaone4", {"sliding_window": 48}, "windows in exaone4 models of 64 layers only"),
        ("phimoe", {}, "reads their layer norms as RMS norms"),
    ],
)
def test_models_that_llama_cpp_computes_otherwise(
    load: LoadModel, tmp_path: Path, monkeypatch: Any, family: str, keys: dict[str, Any], message: str
) -> None:
    entry = FAMILIES[family]
    metadata = {**entry.metadata, **{f"attention.{key}": value for key, value in keys.items()}}
    monkeypatch.setitem(FAMILIES, family, replace(entry, metadata=metadata))
    with pytest.raises(UnsupportedModel, match=message):
        load(family_model(tmp_path, family))


def test_supports_runs_the_same_checks(tmp_path: Path) -> None:
    path = changed_model(tmp_path / "model.gguf", llama__rope__scaling__type="bogus")
    support = LlamaCppBackend().supports(path)
    assert (support.supported, "'bogus'" in support.reason) == (False, True)


def test_valid_files_pass(load: LoadModel, tmp_path: Path) -> None:
    path = changed_model(tmp_path / "model.gguf", llama__rope__scaling__type="linear", llama__expert_count=0)
    assert np.isfinite(feed(new_context(load(path)), [1, 2])).all()
