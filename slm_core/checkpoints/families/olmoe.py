"""olmoe: OLMoE. Experts, and norms over all queries and all keys."""

from __future__ import annotations

from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import ATTENTION, HEAD_NORMS, NORMS, SILU, decoder, experts, read_sizes
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope


def recipe(config: Config) -> Recipe:
    """Read an olmoe."""
    sizes = read_sizes(config, eps=1e-5)
    config.only("hidden_act", *SILU)
    for name in ("attention_bias", "norm_topk_prob"):
        config.only(name, False)
    config.only("clip_qkv")
    config.neutral("num_local_experts")  # another name of the same value
    n_experts = config.size("num_experts", 64, MAX_PARTS)
    metadata = {"expert_count": n_experts, "expert_used_count": config.size("num_experts_per_tok", 8)}
    block = ATTENTION | HEAD_NORMS | NORMS | weights({"ffn_gate_inp": "mlp.gate"})
    block |= experts("mlp.experts.{x}", "gate_proj", "up_proj", "down_proj", n_experts)
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    return decoder(config, "olmoe", sizes, block, positions, tied=False, metadata=metadata)
