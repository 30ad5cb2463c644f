"""Each encoder of the table as a transformers model, and the conversion of its tensors to a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from native.architectures.cases import Case
from native.architectures.conversion import Array, norms_plus_one, renamed, without


def _fused(name: str, values: Array, metadata: Mapping[str, Any]) -> Any:
    """Drop separate queries, keys and values: ``extra`` adds the fused matrix."""
    return iter(()) if ".self_attn." in name and "o_proj" not in name else None


def _fuse(model: Any) -> dict[str, Array]:
    return {
        f"blk.{i}.attn_qkv.weight": torch.cat(
            [layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight]
        )
        .detach()
        .numpy()
        for i, layer in enumerate(model.layers)
    }


def dense_layers() -> dict[str, Array]:
    """The dense layers that sentence-transformers adds to EmbeddingGemma."""
    rng = np.random.default_rng(5)
    shapes = {"dense_2.weight": (352, 288), "dense_3.weight": (288, 352)}
    return {name: rng.standard_normal(shape).astype(np.float32) / 16 for name, shape in shapes.items()}


def _dense(states: Array) -> Array:
    for weight in dense_layers().values():
        states = states @ weight.T
    return states


_MASK = {"pad_token_id": 0, "cls_token_id": 0, "sep_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
"""Token ids that the classes require; the tests pad no text."""
CASES: dict[str, Case] = {
    "bert": Case("BertModel", "BertConfig", _MASK, (without(r"^pooler"),)),
    "nomic_bert": Case(
        "NomicBertModel",
        "NomicBertConfig",
        _MASK | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
        (
            _fused,
            renamed(r"layers\.(\d+)\.post_attention_layernorm", r"blk.\1.attn_output_norm"),
            renamed(r"layers\.(\d+)\.post_mlp_layernorm", r"blk.\1.layer_output_norm"),
            renamed(r"layers\.(\d+)\.mlp\.(gate|up|down)_proj", r"blk.\1.ffn_\2"),
            renamed(r"layers\.(\d+)\.self_attn.o_proj", r"blk.\1.attn_output"),
        ),
        extra=_fuse,
    ),
    "modern_bert": Case(
        "ModernBertModel",
        "ModernBertConfig",
        _MASK
        | {
            "local_attention": 48,
            "norm_eps": 1e-5,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1.6e5},
            },
        },
    ),
    "gemma_embedding": Case(
        "Gemma3TextModel",
        "Gemma3TextConfig",
        {
            "use_bidirectional_attention": True,
            "sliding_window": 48,
            "query_pre_attn_scalar": 16,
            "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
        (norms_plus_one,),
        extra=lambda model: dense_layers(),
    ),
}
POST_LAYERS: Mapping[str, Callable[[Array], Array]] = {"gemma_embedding": _dense}
"""Layers that the file applies to hidden states and the class does not."""
