"""Saves transformers models as directories, and changes these directories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers.utils.logging import disable_progress_bar

from slm_conformance.oracle.factories import n_vocab

WEIGHTS, CONFIG = "model.safetensors", "config.json"
WITHOUT_ROPE = ("bert", "bloom", "dbrx", "falcon_mamba", "gpt2", "jamba", "mamba", "mamba2", "mpt")
"""Model types whose published configurations have neither RoPE parameters nor a head width."""


def save_directory(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model with the keys that its configuration class knows, and with a tokenizer of as many tokens."""
    disable_progress_bar()
    model.save_pretrained(folder, **options)
    known = type(model.config)().to_dict().keys() | {"architectures", "dtype"}
    if model.config.model_type not in WITHOUT_ROPE:
        known |= {"head_dim", "rope_parameters"}
    known -= {"eos_token_id"}
    change_config(folder, lambda config: {key: value for key, value in config.items() if key in known})
    tokens = {chr(0x4E00 + i): i for i in range(n_vocab())}
    Tokenizer(BPE(tokens, [])).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def change_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change ``config.json``."""
    path = folder / CONFIG
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change the weights."""
    save_file(
        {name: tensor.contiguous() for name, tensor in change(load_file(folder / WEIGHTS)).items()}, folder / WEIGHTS
    )
