"""phi3: Phi 3, 3.5 and 4. A llama with fused matrices; models for long contexts have LongRoPE."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import NORMS, SILU, decoder, read_sizes, window_of
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope

_BLOCK = NORMS | weights(
    {
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    }
)


def recipe(config: Config) -> Recipe:
    """Read a phi3."""
    sizes = read_sizes(config, eps=1e-5)
    config.only("hidden_act", *SILU)
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.only(name, False)
    for name in ("full_attn_mod", "interpolate_factor"):  # keys of Phi 4 mini; its class reads neither
        config.only(name, 1)
    config.neutral("original_max_position_embeddings")  # without scaling
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, partial=1.0)
    metadata = {"attention.sliding_window": window_of(config)}
    return decoder(config, "phi3", sizes, _BLOCK, positions, tied=False, metadata=metadata)
