"""Valid adapters of a tiny llama: a GGUF file, a control vector, a directory of PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from slm_conformance.oracle.adapters import random_adapter, random_control_vector, usual_matrices
from slm_conformance.oracle.weights import Weights
from tests.hostile.folders import Folder, safetensors

_MODULES = {"attn_q": "self_attn.q_proj", "attn_v": "self_attn.v_proj", "ffn_up": "mlp.up_proj"}
_RANK = 3


def gguf_adapter(path: Path, model: Path) -> bytes:
    """The bytes of a GGUF adapter of all matrices of the blocks."""
    weights = Weights.read(model)
    return random_adapter(path, "llama", weights, usual_matrices(weights), 0).path.read_bytes()


def control_vector(path: Path, model: Path) -> bytes:
    """The bytes of a control vector with directions for all layers but the first."""
    return random_control_vector(path, Weights.read(model), 0).path.read_bytes()


def peft_adapter(model: Path) -> Folder:
    """A directory of PEFT with changes of some matrices."""
    rng, tensors = np.random.default_rng(0), {}
    for name, matrix in sorted(Weights.read(model).tensors.items()):
        block, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind in _MODULES:
            module = f"base_model.model.model.layers.{block.removeprefix('blk.')}.{_MODULES[kind]}"
            n_out, n_in = matrix.shape
            tensors[f"{module}.lora_A.weight"] = rng.normal(size=(_RANK, n_in)).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = rng.normal(size=(n_out, _RANK)).astype(np.float32)
    config = {
        "peft_type": "LORA", "r": _RANK, "lora_alpha": 6, "bias": "none", "use_rslora": False, "use_dora": False,
        "rank_pattern": {"v_proj": _RANK}, "alpha_pattern": {"up_proj": 4.5}, "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": None, "init_lora_weights": True, "fan_in_fan_out": False, "task_type": "CAUSAL_LM",
    }  # fmt: skip
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": safetensors(tensors)}
