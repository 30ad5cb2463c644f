"""The part of ``config.json`` that a GGUF file's metadata state: sizes, for the names and order of tensors."""

from __future__ import annotations

from typing import Any

from slm_core.checkpoints.reading import family_names
from slm_core.gguf import WeightSource

_MODEL_TYPES = {
    "command-r": "cohere",
    "deepseek2": "deepseek_v2",
    "ernie4_5-moe": "ernie4_5",
    "gemma3": "gemma3_text",
    "gptneox": "gpt_neox",
    "mistral3": "ministral3",
    "phi2": "phi",
    "qwen2moe": "qwen2_moe",
    "qwen2vl": "qwen2_vl",
    "qwen3moe": "qwen3_moe",
}
"""The ``model_type`` by architecture in GGUF files, if the names differ."""
_AMBIGUOUS = ("falcon",)
"""Families whose metadata do not say in which order the directory has the rows of a fused matrix."""
_SIZES = {
    "embedding_length": "hidden_size n_embd d_model",
    "feed_forward_length": "intermediate_size n_inner",
    "context_length": "max_position_embeddings n_positions max_seq_len",
    "attention.head_count": "num_attention_heads n_head n_heads",
    "block_count": "num_hidden_layers n_layer n_layers",
    "attention.head_count_kv": "num_key_value_heads num_kv_heads",
    "attention.key_length": "head_dim query_pre_attn_scalar",
}
"""The names of sizes in configurations, by GGUF's."""


def config_of(source: WeightSource) -> dict[str, Any]:
    """The part of ``config.json`` that is known, in the names of all families; a family may need more keys."""
    architecture = source.require("general.architecture", str)
    name = _MODEL_TYPES.get(architecture, architecture.replace("-", "_"))
    sizes = {ours: source.metadata.get(f"{architecture}.{ours}") for ours in _SIZES}
    if sizes["attention.key_length"] is None and isinstance(width := sizes["embedding_length"], int):
        n_heads = sizes["attention.head_count"]
        sizes["attention.key_length"] = width // n_heads if isinstance(n_heads, int) and n_heads > 0 else None
    config: dict[str, Any] = {
        name: value for ours, value in sizes.items() if isinstance(value, int) for name in _SIZES[ours].split()
    }
    if name in family_names() and name not in _AMBIGUOUS:
        config["model_type"] = name
    return {**config, "rope_parameters": {}, "tie_word_embeddings": "output.weight" not in source.tensors}
