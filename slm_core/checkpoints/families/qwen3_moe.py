"""qwen3_moe: Qwen3 with experts."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, HEAD_NORMS, NORMS, SILU, decoder, experts, read_sizes
from slm_core.checkpoints.families.qwen2 import refuse_windows
from slm_core.checkpoints.families.qwen2_moe import check_experts
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope
from slm_core.errors import UnsupportedModel


def recipe(config: Config) -> Recipe:
    """Read a qwen3_moe."""
    sizes = read_sizes(config, num_key_value_heads=4)
    config.only("hidden_act", *SILU)
    config.only("attention_bias", False)
    if not config.flag("norm_topk_prob", False):
        raise UnsupportedModel(f"{config.source}: 'norm_topk_prob' is false, which is not implemented (accepted: true)")
    refuse_windows(config, sizes)
    n_experts = check_experts(config, 128)
    metadata = {
        "expert_count": n_experts,
        "expert_used_count": config.size("num_experts_per_tok", 8),
        "expert_feed_forward_length": config.size("moe_intermediate_size", 768),
    }
    block = ATTENTION | HEAD_NORMS | NORMS | weights({"ffn_gate_inp": "mlp.gate"})
    block |= experts("mlp.experts.{x}", "gate_proj", "up_proj", "down_proj", n_experts)
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    return decoder(config, "qwen3moe", sizes, block, positions, tied=False, metadata=metadata)
