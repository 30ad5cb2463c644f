"""deepseek_v3: DeepSeek V3 and R1, Moonlight. A deepseek_v2 with another router, and experts in groups."""

from __future__ import annotations

from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.families.deepseek_v2 import latent_recipe
from slm_core.checkpoints.recipe import Part, Recipe
from slm_core.gguf import PlainValue

_BIAS = {"exp_probs_b.bias": Part("mlp.gate.e_score_correction_bias")}
_SIGMOID = 2  # GGUF's number


def recipe(config: Config) -> Recipe:
    """Read a deepseek_v3."""
    config.only("topk_method", "noaux_tc")
    config.only("scoring_func", "sigmoid")
    metadata: dict[str, PlainValue] = {
        "leading_dense_block_count": config.count("first_k_dense_replace", 3),
        "expert_count": config.size("n_routed_experts", 256, MAX_PARTS),
        "expert_used_count": config.size("num_experts_per_tok", 8),
        "expert_feed_forward_length": config.size("moe_intermediate_size", 2048),
        "expert_shared_count": config.size("n_shared_experts", 1),
        "expert_weights_scale": config.number("routed_scaling_factor", 2.5),
        "expert_weights_norm": config.flag("norm_topk_prob", True),
        "expert_gating_func": _SIGMOID,
        "expert_group_count": config.size("n_group", 8, MAX_PARTS),
        "expert_group_used_count": config.size("topk_group", 4, MAX_PARTS),
    }
    n_mtp = min(config.count("num_nextn_predict_layers", 1), MAX_PARTS)
    return latent_recipe(config, metadata, _BIAS, config.size("num_key_value_heads", 128), n_mtp)
