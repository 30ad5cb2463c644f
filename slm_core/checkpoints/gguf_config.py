"""What the metadata of a GGUF file say of its model's ``config.json``: sizes, for the names and order of tensors."""

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
    "phi2": "phi",
    "qwen2moe": "qwen2_moe",
    "qwen2vl": "qwen2_vl",
    "qwen3moe": "qwen3_moe",
}
"""By architecture in GGUF files, where the names differ."""
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}


def config_of(source: WeightSource) -> dict[str, Any]:
    """The part of ``config.json`` that is known; a family may need more keys."""
    architecture = source.require("general.architecture", str)
    name = _MODEL_TYPES.get(architecture, architecture.replace("-", "_"))
    sizes = {key: source.metadata.get(f"{architecture}.{ours}") for key, ours in _SIZES.items()}
    config: dict[str, Any] = {key: value for key, value in sizes.items() if isinstance(value, int)}
    if name in family_names():
        config["model_type"] = name
    return {**config, "tie_word_embeddings": "output.weight" not in source.tensors}
