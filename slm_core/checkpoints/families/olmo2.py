"""olmo2: OLMo 2. Post-norms, and norms over all queries and all keys."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, HEAD_NORMS, SILU, decoder, read_sizes
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope

BLOCK = ATTENTION | HEAD_NORMS | GATED
BLOCK |= weights({"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"})


def recipe(config: Config) -> Recipe:
    """Read an olmo2."""
    sizes = read_sizes(config, eps=1e-5)
    config.only("hidden_act", *SILU)
    config.only("attention_bias", False)
    return decoder(config, "olmo2", sizes, BLOCK, read_rope(config, sizes.head_dim, sizes.n_ctx), tied=False)
