"""gemma: Gemma 1. Norm weights are stored minus 1."""

from __future__ import annotations

from slm_core.checkpoints.changes import OneAdded
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, GELU_TANH, NORMS, decoder, read_sizes
from slm_core.checkpoints.recipe import Recipe, changed, weights
from slm_core.checkpoints.rope import read_rope

NORM_ADDED = weights({"output_norm": "model.norm"}, OneAdded())


def recipe(config: Config) -> Recipe:
    """Read a gemma; "gelu" in early configurations means the tanh approximation, as in the original code."""
    sizes = read_sizes(config, num_key_value_heads=16, head_dim=256)
    config.only("hidden_act", *GELU_TANH, "gelu")
    config.only("hidden_activation", *GELU_TANH)
    config.only("attention_bias", False)
    config.only("use_bidirectional_attention", False)
    block = ATTENTION | GATED | changed(NORMS, OneAdded(), "attn_norm", "ffn_norm")
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    return decoder(config, "gemma", sizes, block, positions, tied=True, model=NORM_ADDED)
