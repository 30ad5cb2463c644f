"""qwen2_moe: Qwen1.5 and Qwen2 with routed experts and a gated shared expert."""

from __future__ import annotations

from slm_core.checkpoints.changes import Row
from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import ATTENTION, NORMS, SILU, decoder, experts, read_sizes, with_biases
from slm_core.checkpoints.families.qwen2 import refuse_windows
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope


def recipe(config: Config) -> Recipe:
    """Read a qwen2_moe; every layer has experts."""
    sizes = read_sizes(config, num_key_value_heads=16)
    config.only("hidden_act", *SILU)
    config.only("norm_topk_prob", False)
    config.only("qkv_bias", True)
    refuse_windows(config, sizes)
    n_experts = check_experts(config, 60)
    metadata = {
        "expert_count": n_experts,
        "expert_used_count": config.size("num_experts_per_tok", 4),
        "expert_feed_forward_length": config.size("moe_intermediate_size", 1408),
        "expert_shared_feed_forward_length": config.size("shared_expert_intermediate_size", 5632),
    }
    block = with_biases(ATTENTION, "attn_q", "attn_k", "attn_v") | NORMS | weights({"ffn_gate_inp": "mlp.gate"})
    block |= experts("mlp.experts.{x}", "gate_proj", "up_proj", "down_proj", n_experts)
    block |= weights({f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")})
    block |= weights({"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}, Row())
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    return decoder(config, "qwen2moe", sizes, block, positions, tied=False, metadata=metadata)


def check_experts(config: Config, default: int) -> int:
    """The number of experts; every layer must have experts."""
    config.only("mlp_only_layers", [])
    config.only("decoder_sparse_step", 1)
    if "num_experts" in config:
        config.neutral("num_local_experts")  # another name of the same value
        return config.size("num_experts", largest=MAX_PARTS)
    return config.size("num_local_experts", default, MAX_PARTS)
