"""glm4: GLM 4 of 2025. Pre-norms and post-norms, RoPE on half of a head."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, SILU, decoder, read_sizes, with_biases
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope

_NORMS = weights(
    {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    }
)
_FEED_FORWARD = weights({"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"})


def recipe(config: Config) -> Recipe:
    """Read a glm4."""
    sizes = read_sizes(config, eps=1.5625e-07, num_key_value_heads=2, head_dim=128)
    config.only("hidden_act", *SILU)
    attention = with_biases(ATTENTION, "attn_q", "attn_k", "attn_v", wanted=config.flag("attention_bias", True))
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, partial=0.5)
    return decoder(config, "glm4", sizes, attention | _NORMS | _FEED_FORWARD, positions, tied=False)
