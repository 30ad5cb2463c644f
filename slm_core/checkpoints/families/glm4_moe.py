"""glm4_moe: GLM 4.5. Routed and shared experts behind dense blocks, RoPE on half of a head, a block for MTP."""

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
from slm_core.checkpoints.recipe import Part, Recipe, mtp, weights
from slm_core.checkpoints.rope import read_rope
from slm_core.gguf import PlainValue

_NORMS = weights({"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"})
_SHARED = weights({f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")})
_SIGMOID = 2  # GGUF's number


def recipe(config: Config) -> Recipe:
    """Read a glm4_moe."""
    config.only("hidden_act", *SILU)
    sizes = read_sizes(config, eps=1e-5, num_key_value_heads=8)
    n_experts = config.size("n_routed_experts", 128, MAX_PARTS)
    metadata: dict[str, PlainValue] = {
        "leading_dense_block_count": config.count("first_k_dense_replace", 1),
        "expert_count": n_experts,
        "expert_used_count": config.size("num_experts_per_tok", 8),
        "expert_feed_forward_length": config.size("moe_intermediate_size", 1408),
        "expert_shared_count": config.size("n_shared_experts", 1),
        "expert_weights_scale": config.number("routed_scaling_factor", 1.0),
        "expert_weights_norm": config.flag("norm_topk_prob", True),
        "expert_gating_func": _SIGMOID,
        "expert_group_count": config.size("n_group", 1, MAX_PARTS),
        "expert_group_used_count": config.size("topk_group", 1, MAX_PARTS),
    }
    attention = with_biases(ATTENTION, "attn_q", "attn_k", "attn_v", wanted=config.flag("attention_bias", False))
    attention |= _NORMS | (HEAD_NORMS if config.flag("use_qk_norm", False) else {})
    routed = attention | weights({"ffn_gate_inp": "mlp.gate"}) | _SHARED
    routed |= {"exp_probs_b.bias": Part("mlp.gate.e_score_correction_bias")}
    routed |= experts("mlp.experts.{x}", "gate_proj", "up_proj", "down_proj", n_experts)
    n_blocks = sizes.n_layers + min(config.count("num_nextn_predict_layers", 0), MAX_PARTS)
    n_dense = min(int(str(metadata["leading_dense_block_count"])), n_blocks)
    blocks = [attention | GATED] * n_dense + [routed] * (n_blocks - n_dense)
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, partial=0.5)
    recipe = decoder(config, "glm4moe", sizes, blocks[: sizes.n_layers], positions, tied=False, metadata=metadata)
    return replace(recipe, mtp_blocks=[mtp(block) for block in blocks[sizes.n_layers :]])
