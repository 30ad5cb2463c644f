"""phimoe: Phi 3.5 MoE. A phi3 with two experts for each token, layer norms, and biases outside the experts."""

from __future__ import annotations

from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import (
    ATTENTION,
    NORMS,
    SILU,
    decoder,
    experts,
    outside,
    read_sizes,
    window_of,
    with_biases,
)
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import Positions, read_rope, stated_rope
from slm_core.errors import UnsupportedModel


def recipe(config: Config) -> Recipe:
    """Read a phimoe, with the biases that its architecture has."""
    sizes = read_sizes(config, eps=1e-5, num_key_value_heads=8)
    config.only("hidden_act", *SILU)
    for name in ("attention_bias", "lm_head_bias"):
        config.flag(name)  # off by default
        config.only(name, True)
    config.only("router_jitter_noise", 0.01)  # the threshold of the second expert: GGUF files have no key for it
    config.neutral("input_jitter_noise")
    n_experts = config.size("num_local_experts", 16, MAX_PARTS)
    metadata = {
        "expert_count": n_experts,
        "expert_used_count": config.size("num_experts_per_tok", 2),
        "attention.sliding_window": window_of(config),
    }
    block = with_biases(ATTENTION | NORMS) | weights({"ffn_gate_inp": "block_sparse_moe.gate"})
    block |= experts("block_sparse_moe.experts.{x}", "w1", "w3", "w2", n_experts)
    model = with_biases(outside(config, tied=False), "output_norm", "output")
    positions = _with_magnitude(config, read_rope(config, sizes.head_dim, sizes.n_ctx, 1e6))
    return decoder(config, "phimoe", sizes, block, positions, tied=False, model=model, metadata=metadata)


def _with_magnitude(config: Config, positions: Positions) -> Positions:
    """``positions`` with the magnitude that its configurations state for long and for short contexts."""
    where = stated_rope(config, 1e6).where
    stated = {where.number(name) for name in ("long_mscale", "short_mscale") if name in where}
    if len(stated) > 1:
        raise UnsupportedModel(f"{config.source}: 'long_mscale' differs from 'short_mscale', which is not implemented")
    if not stated:
        return positions
    return positions._replace(metadata={**positions.metadata, "rope.scaling.attn_factor": stated.pop()})
