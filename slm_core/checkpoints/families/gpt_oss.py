"""gpt_oss: gpt-oss. Experts in MXFP4 with biases and a clamped gate, sinks, a window in every other layer, YaRN."""

from __future__ import annotations

from slm_core.checkpoints.changes import Both, Change, Slice, Transposed
from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import ATTENTION, SILU, decoder, read_sizes, with_biases
from slm_core.checkpoints.mxfp4 import BLOCKS
from slm_core.checkpoints.recipe import Part, Parts, Recipe, weights
from slm_core.checkpoints.rope import read_rope, sliding_layers
from slm_core.errors import UnsupportedModel
from slm_core.gguf import PlainValue

_NORMS = weights({"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"})
_ROUTER = weights({"ffn_gate_inp": "mlp.router"})
_ALTERNATING = {"ffn_gate_exps": 0, "ffn_up_exps": 1}
"""Rows of the up matrix, for each expert."""


def recipe(config: Config) -> Recipe:
    """Read a gpt_oss, its experts packed or not."""
    sizes = read_sizes(config, eps=1e-5, head_dim=64, num_key_value_heads=8)
    config.only("hidden_act", *SILU)
    config.only("attention_bias", True)
    config.only("swiglu_alpha", 1.702)
    config.only("swiglu_limit", 7.0)
    config.neutral("experts_per_token", "initial_context_length")  # other names of the same values
    if "rope_parameters" not in config and "rope_scaling" not in config:  # without them, its class has another default
        raise UnsupportedModel(f"{config.source}: 'rope_parameters' is missing")
    n_ff = sizes.metadata["feed_forward_length"]
    metadata: dict[str, PlainValue] = {
        "expert_count": config.size("num_local_experts", 128, MAX_PARTS),
        "expert_used_count": config.size("num_experts_per_tok", 4),
        "expert_feed_forward_length": n_ff,
        "attention.sliding_window": config.size("sliding_window", 128),
        "attention.sliding_window_pattern": sliding_layers(config, sizes.n_layers, lambda i: i % 2 == 0),
    }
    packed = config.part("quantization_config").text("quant_method", "none") == "mxfp4"
    block = {**with_biases(ATTENTION | _ROUTER), **_NORMS, **_experts(packed=packed)}
    block["attn_sinks.weight"] = Part("self_attn.sinks")
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, 150_000.0)
    return decoder(config, "gpt-oss", sizes, block, positions, tied=False, metadata=metadata)


def _experts(*, packed: bool) -> Parts:
    """Matrices as (in, out); packed ones as (out, in), because their rows are whole blocks."""
    parts = {"ffn_down_exps.bias": Part("mlp.experts.down_proj_bias")}
    ending = BLOCKS if packed else ""
    parts["ffn_down_exps.weight"] = Part(f"mlp.experts.down_proj{ending}", None if packed else Transposed())
    for name, index in _ALTERNATING.items():
        rows = Slice(1, 2, index, alternating=True)
        change: Change = rows if packed else Both(Transposed(), rows)
        parts[f"{name}.weight"] = Part(f"mlp.experts.gate_up_proj{ending}", change)
        parts[f"{name}.bias"] = Part("mlp.experts.gate_up_proj_bias", rows)
    return parts
