"""llama4_text: Llama 4, text model. Chunked attention; every fourth layer has global attention without positions."""

from __future__ import annotations

from slm_core.checkpoints.changes import Both, Slice, Transposed
from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import ATTENTION, NORMS, SILU, Sizes, decoder, read_sizes
from slm_core.checkpoints.recipe import Part, Parts, Recipe, weights
from slm_core.checkpoints.rope import read_rope
from slm_core.errors import UnsupportedModel

_NOPE_STEP, _WITHOUT_HEAD_NORMS = 4, 128
_DENSE = weights({f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")})
_ROUTED = weights(
    {
        "ffn_gate_inp": "feed_forward.router",
        **{f"ffn_{name}_shexp": f"feed_forward.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    }
)


def recipe(config: Config) -> Recipe:
    """Read the text model of a llama4."""
    sizes = read_sizes(config, eps=1e-5, num_key_value_heads=8, head_dim=128)
    n_ff, step = config.size("intermediate_size"), config.size("interleave_moe_layer_step", 1)
    n_experts = config.size("num_local_experts", 16, MAX_PARTS)
    sizes.metadata["feed_forward_length"] = config.size("intermediate_size_mlp")
    metadata = {
        "expert_count": n_experts,
        "expert_used_count": config.size("num_experts_per_tok", 1),
        "expert_feed_forward_length": n_ff,
        "interleave_moe_layer_step": step,
    }
    _check_constants(config, n_experts)
    _check_layers(config, sizes, step)
    shared = ATTENTION | NORMS
    routed: Parts = shared | _ROUTED | _experts()
    blocks = [routed if (i + 1) % step == 0 else shared | _DENSE for i in range(sizes.n_layers)]
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, 5e5)
    return decoder(config, "llama4", sizes, blocks, positions, tied=False, metadata=metadata)


def _check_constants(config: Config, n_experts: int) -> None:
    """Check the settings that GGUF files do not store."""
    config.only("hidden_act", *SILU)
    config.only("attention_bias", False)
    config.only("attention_chunk_size", 8192)
    config.only("attn_temperature_tuning", True, 4)
    config.only("floor_scale", 8192)
    config.only("attn_scale", 0.1)
    config.only("use_qk_norm", n_experts != _WITHOUT_HEAD_NORMS)
    config.neutral("for_llm_compressor", "layer_types")  # the latter repeats no_rope_layers


def _check_layers(config: Config, sizes: Sizes, step: int) -> None:
    """Check lists of layers with RoPE or experts, which follow from periods in GGUF files."""
    config.only("no_rope_layer_interval", _NOPE_STEP)
    lists = {
        "no_rope_layers": [int((i + 1) % _NOPE_STEP != 0) for i in range(sizes.n_layers)],
        "moe_layers": list(range(step - 1, sizes.n_layers, step)),
    }
    for name, expected in lists.items():
        if config.integers(name) not in ([], expected):
            raise UnsupportedModel(f"{config.source}: {name!r} is not {expected}, and nothing else is implemented")


def _experts() -> dict[str, Part]:
    """The matrices of all experts, stored as (in, out), gate before up."""
    both, down = "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"
    gate, up = (Part(both, Both(Transposed(), Slice(1, 2, i))) for i in range(2))
    return {
        "ffn_gate_exps.weight": gate,
        "ffn_up_exps.weight": up,
        "ffn_down_exps.weight": Part(down, Transposed()),
    }
