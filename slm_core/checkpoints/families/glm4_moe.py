"""glm4_moe: GLM 4.5. Routed and shared experts after dense blocks, RoPE on half of a head, a block for MTP."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import (
    ATTENTION,
    GATED,
    HEAD_NORMS,
    SILU,
    decoder,
    experts,
    read_sizes,
    with_biases,
)
from slm_core.checkpoints.families.deepseek_v2 import SHARED_EXPERT
from slm_core.checkpoints.families.deepseek_v3 import ROUTER_BIAS, Defaults, expert_metadata
from slm_core.checkpoints.recipe import Recipe, mtp, weights
from slm_core.checkpoints.rope import read_rope

_NORMS = weights({"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"})
_DEFAULTS = Defaults(n_dense=1, n_experts=128, n_ff=1408, scale=1.0, n_groups=1, n_groups_used=1)


def recipe(config: Config) -> Recipe:
    """Read a glm4_moe."""
    config.only("hidden_act", *SILU)
    sizes = read_sizes(config, eps=1e-5, num_key_value_heads=8)
    metadata = expert_metadata(config, _DEFAULTS)
    n_experts, n_dense = (int(str(metadata[key])) for key in ("expert_count", "leading_dense_block_count"))
    attention = with_biases(ATTENTION, "attn_q", "attn_k", "attn_v", wanted=config.flag("attention_bias", False))
    attention |= _NORMS | (HEAD_NORMS if config.flag("use_qk_norm", False) else {})
    routed = attention | weights({"ffn_gate_inp": "mlp.gate"}) | SHARED_EXPERT | ROUTER_BIAS
    routed |= experts("mlp.experts.{x}", "gate_proj", "up_proj", "down_proj", n_experts)
    n_blocks = sizes.n_layers + min(config.count("num_nextn_predict_layers", 0), MAX_PARTS)
    n_dense = min(n_dense, n_blocks)
    blocks = [attention | GATED] * n_dense + [routed] * (n_blocks - n_dense)
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, partial=0.5)
    recipe = decoder(config, "glm4moe", sizes, blocks[: sizes.n_layers], positions, tied=False, metadata=metadata)
    return replace(recipe, mtp_blocks=[mtp(block) for block in blocks[sizes.n_layers :]])
