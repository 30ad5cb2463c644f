"""qwen3: Qwen3, dense."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, HEAD_NORMS, NORMS, SILU, decoder, read_sizes
from slm_core.checkpoints.families.qwen2 import refuse_windows
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.rope import read_rope


def recipe(config: Config) -> Recipe:
    """Read a qwen3."""
    sizes = read_sizes(config, num_key_value_heads=32, head_dim=128)
    config.only("hidden_act", *SILU)
    config.only("attention_bias", False)
    refuse_windows(config, sizes)
    block = ATTENTION | HEAD_NORMS | GATED | NORMS
    return decoder(config, "qwen3", sizes, block, read_rope(config, sizes.head_dim, sizes.n_ctx), tied=False)
