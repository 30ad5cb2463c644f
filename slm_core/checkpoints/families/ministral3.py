"""ministral3: Ministral 3. A mistral that scales queries beyond its original training context."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, NORMS, SILU, decoder, interleaved, read_sizes
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.rope import read_rope, stated_rope


def recipe(config: Config) -> Recipe:
    """Read a ministral3."""
    sizes = read_sizes(config, eps=1e-5, num_key_value_heads=8, head_dim=128)
    config.only("hidden_act", *SILU)
    config.only("sliding_window")
    rope = stated_rope(config, 1e6)
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, 1e6)
    metadata = {"attention.temperature_scale": rope.where.number("llama_4_scaling_beta")}
    block = interleaved(ATTENTION, sizes) | GATED | NORMS
    return decoder(config, "mistral3", sizes, block, positions, tied=False, metadata=metadata)
