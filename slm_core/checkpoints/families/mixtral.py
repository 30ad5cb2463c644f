"""mixtral: Mixtral. A llama with experts."""

from __future__ import annotations

from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import ATTENTION, NORMS, SILU, decoder, experts, interleaved, read_sizes
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope


def recipe(config: Config) -> Recipe:
    """Read a mixtral."""
    sizes = read_sizes(config, eps=1e-5, num_key_value_heads=8)
    config.only("hidden_act", *SILU)
    config.only("sliding_window", 0)
    n_experts = config.size("num_local_experts", 8, MAX_PARTS)
    metadata = {"expert_count": n_experts, "expert_used_count": config.size("num_experts_per_tok", 2)}
    block = interleaved(ATTENTION, sizes) | NORMS | weights({"ffn_gate_inp": "block_sparse_moe.gate"})
    block |= experts("block_sparse_moe.experts.{x}", "w1", "w3", "w2", n_experts)
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, 1e6)
    return decoder(config, "llama", sizes, block, positions, tied=False, metadata=metadata)
