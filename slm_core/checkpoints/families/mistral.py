"""mistral: Mistral 7B, Nemo and others; the first one has sliding windows."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, NORMS, SILU, decoder, interleaved, read_sizes, window_of
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.rope import read_rope


def recipe(config: Config) -> Recipe:
    """Read a mistral."""
    sizes = read_sizes(config, num_key_value_heads=8)
    config.only("hidden_act", *SILU)
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    metadata = {"attention.sliding_window": window_of(config, 4096)}
    block = interleaved(ATTENTION, sizes) | GATED | NORMS
    return decoder(config, "llama", sizes, block, positions, tied=False, metadata=metadata)
