"""Directories of PEFT against PEFT itself: transformers models with adapters, and the same weights here."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import slm_core as slm
from native.architectures.checkpoints import save_directory
from native.architectures.engines import Subject, make_subject, transformers_logits
from native.exact import exact
from slm_core.adapters import BaseModel, read_adapter, write_adapter
from slm_core.checkpoints import Checkpoint
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.types import Pos

N_TOKENS = 20
BOUND = 1e-4  # clause 9 of the contract: float32, relative
MOST = "all-linear"  # PEFT's name for all matrices but the output's


class Saved(NamedTuple):
    """A family's GGUF file, its directory, and a function that saves an adapter and returns PEFT's logits."""

    subject: Subject
    folder: Path
    adapt: Callable[..., tuple[Path, np.ndarray]]


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return np.random.default_rng(0).integers(3, 60, N_TOKENS).tolist()


@pytest.fixture
def saved(tmp_path, tokens) -> Callable[[str], Saved]:
    def of(family: str) -> Saved:
        subject = make_subject(tmp_path, family)
        folder = save_directory(subject.model, tmp_path / "hf")

        def adapt(**config: Any) -> tuple[Path, np.ndarray]:
            torch.manual_seed(1)
            options = {"r": 3, "lora_alpha": 5, "target_modules": MOST, "init_lora_weights": False, **config}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings of the import, and about tied embeddings and Conv1D
                import peft  # not at the top: it takes seconds in each worker of pytest

                model = peft.get_peft_model(subject.model, peft.LoraConfig(**options))
                model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
                rows = transformers_logits(model, tokens)
            return tmp_path / "adapter", rows

        return Saved(subject, folder, adapt)

    return of


def logits(source: Path, adapter: Path, tokens: list[int]) -> np.ndarray:
    """Logits of the native reference tier after each token."""
    with slm.load(source, backend="native", tier="reference") as model:
        model.adapters.load(adapter, "mine")
        with model.model.new_context(exact(n_ctx=N_TOKENS, n_batch=N_TOKENS)) as context:
            context.set_adapters(0, {"mine": 1.0})
            batch = context.new_batch()
            batch.extend(tokens, Pos(0, 0), logits="all")
            return np.array(context.decode(batch))


def error(rows: np.ndarray, expected: np.ndarray) -> float:
    return float((np.linalg.norm(rows - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())


@pytest.mark.parametrize("source", ["directory", "file"])
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"use_rslora": True}),  # rows of queries and keys are in another order in files
        ("qwen2", {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"down_proj": 9, "layers.1.mlp.up_proj": 2}}),
        ("qwen2", {"rank_pattern": {"^model.layers.1.mlp.up_proj": 2}, "alpha_pattern": {"^layers.0.mlp.up_proj": 9}}),
        ("phi3", {}),  # fused matrices
        ("gpt2", {"fan_in_fan_out": True}),  # matrices (in, out)
        ("bloom", {}),  # rows of queries, keys and values, grouped by head
        ("gemma3", {}),
        ("mixtral", {"target_modules": ["q_proj", "v_proj", "o_proj"]}),
        ("mistral", {"layers_to_transform": [0, 2], "target_modules": ["k_proj", "gate_proj"]}),
    ],
)
def test_equals_peft(family: str, config: dict[str, Any], source: str, saved, tokens) -> None:
    about = saved(family)
    plain = transformers_logits(about.subject.model, tokens)
    adapter, expected = about.adapt(**config)
    rows = logits(about.folder if source == "directory" else about.subject.path, adapter, tokens)
    assert error(rows, expected) < BOUND
    assert error(plain, expected) > 0.1, "the adapter changes next to nothing"


@pytest.mark.parametrize("source", ["directory", "file"])
def test_embeddings_and_output(source: str, saved, tokens) -> None:
    about = saved("llama")
    adapter, expected = about.adapt(target_modules=["embed_tokens", "lm_head", "q_proj"])
    rows = logits(about.folder if source == "directory" else about.subject.path, adapter, tokens)
    assert error(rows, expected) < BOUND


def test_embeddings_of_tied_models(saved, tokens) -> None:
    """The output matrix stays as it is."""
    about = saved("llama_tied")
    adapter, expected = about.adapt(target_modules=["embed_tokens"])
    assert error(logits(about.subject.path, adapter, tokens), expected) < BOUND


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"alpha_pattern": {"v_proj": 7}}, {"lora_alpha": 0.1}])
def test_the_fingerprint_of_a_converted_adapter(config: dict[str, Any], saved, tmp_path) -> None:
    """A GGUF file has one alpha in float32; dumps accept it in place of the directory that it was made of."""
    about = saved("llama")
    adapter, _ = about.adapt(**config)
    with GgufFile.open(about.subject.path) as file:
        base = BaseModel.of(file)
    converted = read_adapter(adapter, base)
    write_adapter(converted, base.architecture, tmp_path / "converted.gguf")
    assert read_adapter(tmp_path / "converted.gguf", base).info.fingerprint == converted.info.fingerprint


def test_bfloat16(saved, tokens) -> None:
    about = saved("llama")
    adapter, _ = about.adapt()
    from safetensors.torch import load_file, save_file

    weights = adapter / "adapter_model.safetensors"
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(weights).items()}
    save_file(rounded, weights)
    with Checkpoint(about.folder) as source:
        base = BaseModel.of(source)
    change = read_adapter(adapter, base).changes["blk.0.ffn_up.weight"]
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    np.testing.assert_array_equal(change.a, rounded[name].float().numpy())


def test_a_family_whose_file_says_too_little(saved, tokens) -> None:
    """What the GGUF file lacks is read from the ``config.json`` of the original model, next to the adapter."""
    about = saved("falcon")
    adapter, expected = about.adapt()
    with pytest.raises(UnsupportedModel, match=r"copy the config\.json of the original model to"):
        logits(about.subject.path, adapter, tokens)
    shutil.copy(about.folder / "config.json", adapter)
    assert error(logits(about.subject.path, adapter, tokens), expected) < BOUND


def _changed(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"target_parameters": ["gate_up_proj"]}, "target_parameters"),
        ({"a_new_feature": 3}, "a_new_feature"),
        ({"rank_pattern": {"(.*)*x": 4}}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
        ({"r": 7}, "rank 3, and 7 is stated"),
        ({"r": 0}, "'r'"),
        ({"lora_alpha": "high"}, "lora_alpha"),
        ({"lora_alpha": float("1e999")}, "lora_alpha"),
    ],
)
def test_refused_configurations(changes: dict[str, Any], words: str, saved) -> None:
    about = saved("llama")
    adapter, _ = about.adapt()
    _changed(adapter, **changes)
    with GgufFile.open(about.subject.path) as file, pytest.raises((UnsupportedModel, InvalidModelFile), match=words):
        read_adapter(adapter, BaseModel.of(file))


def test_refused_directories(saved, tmp_path) -> None:
    about = saved("llama")
    adapter, _ = about.adapt()
    with GgufFile.open(about.subject.path) as file:
        base = BaseModel.of(file)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InvalidModelFile, match=r"without an adapter_config\.json"):
        read_adapter(empty, base)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(InvalidModelFile, match="pickled weights are never read"):
        read_adapter(adapter, base)


def test_dora_is_named(saved) -> None:
    about = saved("llama")
    adapter, _ = about.adapt(use_dora=True)
    _changed(adapter, use_dora=False)  # its tensors still show that it is DoRA
    with GgufFile.open(about.subject.path) as file, pytest.raises(UnsupportedModel, match="DoRA"):
        read_adapter(adapter, BaseModel.of(file))


def test_another_model(saved) -> None:
    about = saved("llama")
    adapter, _ = about.adapt()
    with GgufFile.open(about.subject.path) as file:
        base = BaseModel.of(file)
    wider = {name: (*shape[:-1], shape[-1] + 32) for name, shape in base.shapes.items()}
    with pytest.raises(InvalidModelFile, match="an adapter of another model"):
        read_adapter(adapter, dataclasses.replace(base, shapes=wider))
