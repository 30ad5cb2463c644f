"""qwen2: Qwen2 and Qwen2.5."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, NORMS, SILU, Sizes, decoder, read_sizes, with_biases
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.rope import read_rope


def recipe(config: Config) -> Recipe:
    """Read a qwen2; sliding windows are not implemented."""
    sizes = read_sizes(config, num_key_value_heads=32)
    config.only("hidden_act", *SILU)
    refuse_windows(config, sizes)
    block = with_biases(ATTENTION, "attn_q", "attn_k", "attn_v") | GATED | NORMS
    return decoder(config, "qwen2", sizes, block, read_rope(config, sizes.head_dim, sizes.n_ctx), tied=False)


def refuse_windows(config: Config, sizes: Sizes) -> None:
    """Refuse sliding-window layers; no published model has them."""
    config.only("use_sliding_window", False)
    config.neutral("sliding_window")
    config.only("layer_types", ["full_attention"] * sizes.n_layers)
