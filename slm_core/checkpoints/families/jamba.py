"""jamba: Jamba. Attention without positions in a few blocks, Mamba in the others, experts in some blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import ATTENTION, SILU, decoder, experts, read_sizes
from slm_core.checkpoints.recipe import Part, Parts, Recipe, weights
from slm_core.checkpoints.recurrent import channels_state
from slm_core.gguf import PlainValue

_NORMS = weights({"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"})
_STATE = channels_state("mamba") | weights({f"ssm_{name}_norm": f"mamba.{name}_layernorm" for name in ("dt", "b", "c")})
_DENSE = weights({f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")})


def recipe(config: Config) -> Recipe:
    """Read a jamba."""
    sizes = read_sizes(config, num_key_value_heads=8)
    config.only("hidden_act", *SILU)
    config.only("mamba_conv_bias", True)
    config.only("mamba_proj_bias", False)
    config.only("sliding_window")
    config.only("num_logits_to_keep", 1)
    config.neutral("use_mamba_kernels", "use_associative_scan", "use_mambapy", "mamba_inner_layernorms")
    n_experts, layers = config.size("num_experts", 16, MAX_PARTS), range(sizes.n_layers)
    attends, routed = _periodic(config, "attn_layer", 8, 4), _periodic(config, "expert_layer", 2, 1)
    keys: dict[str, PlainValue] = {
        "attention.head_count_kv": [sizes.n_kv_heads * attends(i) for i in layers],
        "expert_count": n_experts,
        "expert_used_count": config.size("num_experts_per_tok", 2),
        "ssm.conv_kernel": config.size("mamba_d_conv", 4),
        "ssm.inner_size": config.size("mamba_expand", 2) * sizes.n_embd,
        "ssm.state_size": config.size("mamba_d_state", 16),
        "ssm.time_step_rank": _rank(config, sizes.n_embd),
    }
    if n_experts == 1:
        keys["expert_count"] = keys["expert_used_count"] = 0
    fed = _routed(n_experts)
    blocks = [
        {**_NORMS, **(ATTENTION if attends(i) else _STATE), **(fed if routed(i) and n_experts > 1 else _DENSE)}
        for i in layers
    ]
    base = decoder(config, "jamba", sizes, blocks, None, tied=False, metadata=keys)
    return replace(base, model={**base.model, "output_norm.weight": Part("model.final_layernorm.weight")})


def _periodic(config: Config, name: str, period: int, offset: int) -> Callable[[int], bool]:
    """Whether a block index is in a periodic pattern."""
    n, first = config.size(f"{name}_period", period), config.count(f"{name}_offset", offset)
    return lambda i: i % n == first


def _rank(config: Config, n_embd: int) -> int:
    if "mamba_dt_rank" in config:
        return config.size("mamba_dt_rank")
    return math.ceil(n_embd / 16)


def _routed(n_experts: int) -> Parts:
    router = weights({"ffn_gate_inp": "feed_forward.router"})
    return router | experts("feed_forward.experts.{x}", "gate_proj", "up_proj", "down_proj", n_experts)
