"""ernie4_5: ERNIE 4.5, dense. A llama whose rows are in interleaved order already."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, NORMS, SILU, decoder, read_sizes, with_biases
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.rope import read_rope


def recipe(config: Config) -> Recipe:
    """Read an ernie4_5."""
    sizes = read_sizes(config, eps=1e-5, num_key_value_heads=2, head_dim=128)
    config.only("hidden_act", *SILU)
    block = with_biases(ATTENTION | GATED, wanted=config.flag("use_bias", False)) | NORMS
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, 500_000.0)
    return decoder(config, "ernie4_5", sizes, block, positions, tied=True)
