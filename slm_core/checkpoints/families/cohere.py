"""cohere: Command R and Aya. Parallel attention and feed-forward after one norm, scaled logits."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, HEAD_NORMS, LAYER, SILU, decoder, read_sizes
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope

BLOCK = ATTENTION | GATED | weights({"attn_norm": "input_layernorm"})


def recipe(config: Config) -> Recipe:
    """Read a cohere; Command R+ has per-head norms."""
    sizes = read_sizes(config, norm=LAYER, eps_key="layer_norm_eps", eps=1e-5)
    config.only("hidden_act", *SILU)
    config.only("attention_bias", False)
    config.neutral("model_max_length")  # of Command R: a longer context than that of its RoPE
    block = BLOCK | (HEAD_NORMS if config.flag("use_qk_norm", False) else {})
    metadata = {"logit_scale": config.number("logit_scale", 0.0625)}
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, 500_000.0)
    return decoder(config, "command-r", sizes, block, positions, tied=True, metadata=metadata)
