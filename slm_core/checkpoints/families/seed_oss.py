"""seed_oss: Seed-OSS."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, SILU, decoder, read_sizes, with_biases
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope


def recipe(config: Config) -> Recipe:
    """Read a seed_oss."""
    sizes = read_sizes(config, num_key_value_heads=8, head_dim=128)
    config.only("hidden_act", *SILU)
    config.only("mlp_bias", False)
    config.only("attention_out_bias", False)
    attention = with_biases(ATTENTION, "attn_q", "attn_k", "attn_v", wanted=config.flag("attention_bias", True))
    norms = weights({"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"})
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    return decoder(config, "seed_oss", sizes, attention | GATED | norms, positions, tied=False)
