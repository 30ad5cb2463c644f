"""Directories that a download or a clone left incomplete, or that another program made: the error says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slm_core.checkpoints import Checkpoint
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.reading import recipe_of
from slm_core.checkpoints.safetensors import SafetensorsFile
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.jsonfile import read_json

POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 12345\n"
)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
}


@pytest.mark.parametrize(
    ("name", "read"),
    [("model.safetensors", SafetensorsFile), ("tokenizer.json", read_json), ("model.gguf", GgufFile.open)],
)
def test_a_pointer_of_git_lfs_is_named(tmp_path, name, read):
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(InvalidModelFile, match="a pointer of Git LFS") as raised:
        read(tmp_path / name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("config.json", "model-00001-of-00002.safetensors"), r"shards need .*model\.safetensors\.index\.json"),
        (("adapter_config.json", "adapter_model.safetensors"), "an adapter of PEFT: load its base model"),
        (("config.json", "adapter_config.json", "adapter_model.safetensors"), "an adapter of PEFT"),
    ],
)
def test_directories_without_weights_say_what_is_missing(tmp_path, files, message):
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises((InvalidModelFile, UnsupportedModel), match=message):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("further", [{}, {"quantization_config": {"group_size": 64, "bits": 4}}])
def test_quantized_weights_of_mlx_are_refused_by_name(further):
    with pytest.raises(UnsupportedModel, match="that of MLX"):
        recipe_of(Config(Path("config.json"), {**LLAMA, "quantization": {"group_size": 64, "bits": 4}, **further}))


def test_rotations_of_activations_are_refused():
    """Compressed-tensors applies them at run time, so weights alone would give other results."""
    about = {"quant_method": "compressed-tensors", "format": "float-quantized", "transform_config": {}}
    recipe_of(Config(Path("config.json"), {**LLAMA, "quantization_config": about}))
    about["transform_config"] = {"config_groups": {"R4": {"type": "hadamard"}}}
    with pytest.raises(UnsupportedModel, match=r"'quantization_config\.transform_config'"):
        recipe_of(Config(Path("config.json"), {**LLAMA, "quantization_config": about}))


def test_a_magnitude_of_zero_is_refused():
    """With this value, the divisor of YaRN's magnitude is 0."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    with pytest.raises(UnsupportedModel, match="below 0"):
        recipe_of(
            Config(
                Path("config.json"),
                {**LLAMA, "rope_scaling": {**yarn, "mscale": 0.5, "mscale_all_dim": -7.213475204444817}},
            )
        )
