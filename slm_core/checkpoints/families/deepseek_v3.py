"""deepseek_v3: DeepSeek V3 and R1, Moonlight. A deepseek_v2 with another router, and experts in groups."""

from __future__ import annotations

from typing import NamedTuple

from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.families.deepseek_v2 import latent_recipe
from slm_core.checkpoints.recipe import Part, Recipe
from slm_core.gguf import PlainValue

ROUTER_BIAS = {"exp_probs_b.bias": Part("mlp.gate.e_score_correction_bias")}
_SIGMOID = 2  # GGUF's number


class Defaults(NamedTuple):
    """The sizes of experts that a family's configurations may leave out."""

    n_dense: int
    n_experts: int
    n_ff: int
    scale: float
    n_groups: int
    n_groups_used: int


def recipe(config: Config) -> Recipe:
    """Read a deepseek_v3."""
    config.only("topk_method", "noaux_tc")
    config.only("scoring_func", "sigmoid")
    metadata = expert_metadata(
        config, Defaults(n_dense=3, n_experts=256, n_ff=2048, scale=2.5, n_groups=8, n_groups_used=4)
    )
    n_mtp = min(config.count("num_nextn_predict_layers", 1), MAX_PARTS)
    return latent_recipe(config, metadata, ROUTER_BIAS, config.size("num_key_value_heads", 128), n_mtp)


def expert_metadata(config: Config, defaults: Defaults) -> dict[str, PlainValue]:
    """The keys of experts in groups, chosen by the sigmoid of router scores."""
    return {
        "leading_dense_block_count": config.count("first_k_dense_replace", defaults.n_dense),
        "expert_count": config.size("n_routed_experts", defaults.n_experts, MAX_PARTS),
        "expert_used_count": config.size("num_experts_per_tok", 8),
        "expert_feed_forward_length": config.size("moe_intermediate_size", defaults.n_ff),
        "expert_shared_count": config.size("n_shared_experts", 1),
        "expert_weights_scale": config.number("routed_scaling_factor", defaults.scale),
        "expert_weights_norm": config.flag("norm_topk_prob", True),
        "expert_gating_func": _SIGMOID,
        "expert_group_count": config.size("n_group", defaults.n_groups, MAX_PARTS),
        "expert_group_used_count": config.size("topk_group", defaults.n_groups_used, MAX_PARTS),
    }
