"""granitemoehybrid: Granite 4 H. A granite with Mamba 2 instead of attention in most blocks; experts in some models."""

from __future__ import annotations

from slm_core.checkpoints.changes import Slice
from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import ATTENTION, NORMS, SILU, Sizes, decoder, interleaved, read_sizes
from slm_core.checkpoints.families.granite import multipliers
from slm_core.checkpoints.families.granitemoe import gated_pair
from slm_core.checkpoints.recipe import Parts, Recipe, changed, weights
from slm_core.checkpoints.recurrent import heads_keys, heads_state
from slm_core.checkpoints.rope import Positions, read_rope
from slm_core.errors import UnsupportedModel
from slm_core.gguf import PlainValue

_KINDS = {"linear_attention": False, "mamba": False, "full_attention": True, "attention": True}


def recipe(config: Config) -> Recipe:
    """Read a granitemoehybrid."""
    sizes = read_sizes(config)
    config.only("hidden_act", *SILU)
    config.only("attention_bias", False)
    config.only("normalization_function", "rmsnorm")
    config.neutral("init_method", "mamba_chunk_size")
    attends = _attending(config, sizes.n_layers)
    keys = _state(config, sizes) | multipliers(config)
    keys["attention.head_count_kv"] = [sizes.n_kv_heads * attending for attending in attends]
    feed_forward, about = _feed_forward(config)
    recurrent = heads_state("mamba", int(str(keys["ssm.group_count"])))
    blocks = [
        {**NORMS, **feed_forward, **(interleaved(ATTENTION, sizes) if attending else recurrent)}
        for attending in attends
    ]
    positions = _positions(config, sizes)
    return decoder(config, "granitehybrid", sizes, blocks, positions, tied=False, metadata=keys | about)


def _attending(config: Config, n_layers: int) -> list[bool]:
    """Whether each block has attention; old configurations have other names for the kinds."""
    kinds = config.items("layer_types", str, n_layers)
    if kinds is None or (unknown := set(kinds) - _KINDS.keys()):
        what = "is missing" if kinds is None else f"has {min(unknown)[:80]!r}"
        raise UnsupportedModel(f"{config.source}: 'layer_types' {what} (accepted: {', '.join(_KINDS)})")
    return [_KINDS[kind] for kind in kinds]


def _state(config: Config, sizes: Sizes) -> dict[str, PlainValue]:
    config.only("mamba_conv_bias", True)
    config.only("mamba_proj_bias", False)
    return heads_keys(config, "mamba_", config.size("mamba_expand", 2) * sizes.n_embd)


def _feed_forward(config: Config) -> tuple[Parts, dict[str, PlainValue]]:
    """Routed experts and a shared expert; or only the shared one, as a dense layer."""
    n_experts, n_shared = config.count("num_local_experts", 8), config.size("shared_intermediate_size", 1024)
    n_used = config.count("num_experts_per_tok", 2)
    if n_experts > MAX_PARTS:
        raise UnsupportedModel(f"{config.source}: 'num_local_experts' is {n_experts} (accepted: up to {MAX_PARTS})")
    about: dict[str, PlainValue] = {"expert_count": n_experts, "expert_shared_feed_forward_length": n_shared}
    if not n_experts:
        return _alone(), about | {"feed_forward_length": n_shared}
    routed = weights({"ffn_gate_inp": "block_sparse_moe.router.layer"}) | gated_pair("block_sparse_moe", "exps", axis=1)
    return routed | gated_pair("shared_mlp", "shexp", axis=0), about | {"expert_used_count": n_used}


def _alone() -> Parts:
    parts = weights({"ffn_gate": "shared_mlp.input_linear", "ffn_up": "shared_mlp.input_linear"})
    parts = changed(changed(parts, Slice(0, 2, 0), "ffn_gate"), Slice(0, 2, 1), "ffn_up")
    return parts | weights({"ffn_down": "shared_mlp.output_linear"})


def _positions(config: Config, sizes: Sizes) -> Positions:
    """Most models have no RoPE: recurrent blocks encode the order of tokens."""
    config.only("position_embedding_type", "nope", "rope")
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    if "position_embedding_type" in config and config.text("position_embedding_type") == "rope":
        return positions
    return Positions(positions.metadata | {"rope.scaling.finetuned": False}, {})
