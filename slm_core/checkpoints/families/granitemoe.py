"""granitemoe: Granite 3 with experts."""

from __future__ import annotations

from slm_core.checkpoints.changes import Slice
from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import ATTENTION, NORMS, SILU, decoder, interleaved, read_sizes
from slm_core.checkpoints.families.granite import multipliers
from slm_core.checkpoints.recipe import Part, Recipe, changed, weights
from slm_core.checkpoints.rope import read_rope


def recipe(config: Config) -> Recipe:
    """Read a granitemoe."""
    return granite_recipe(config, 0)


def granite_recipe(config: Config, n_shared: int) -> Recipe:
    """A granite with experts, and an expert of width ``n_shared`` that every token uses."""
    sizes = read_sizes(config)
    config.only("hidden_act", *SILU)
    config.only("attention_bias", False)
    metadata = {
        **multipliers(config),
        "expert_count": config.size("num_local_experts", 8, MAX_PARTS),
        "expert_used_count": config.size("num_experts_per_tok", 2),
    }
    block = interleaved(ATTENTION, sizes) | NORMS | weights({"ffn_gate_inp": "block_sparse_moe.router.layer"})
    block |= gated_pair("block_sparse_moe", "exps", axis=1)
    if n_shared:
        metadata["expert_shared_feed_forward_length"] = n_shared
        block |= gated_pair("shared_mlp", "shexp", axis=0)
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    return decoder(config, "granitemoe", sizes, block, positions, tied=False, metadata=metadata)


def gated_pair(theirs: str, suffix: str, axis: int) -> dict[str, Part]:
    """Gate and up matrices in one tensor, the gate first."""
    parts = weights({f"ffn_{name}_{suffix}": f"{theirs}.input_linear" for name in ("gate", "up")})
    for i, name in enumerate(("gate", "up")):
        parts = changed(parts, Slice(axis, 2, i), f"ffn_{name}_{suffix}")
    return parts | weights({f"ffn_down_{suffix}": f"{theirs}.output_linear"})
