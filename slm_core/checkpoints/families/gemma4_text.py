"""gemma4_text: Gemma 4. Global layers have another head width; per-layer embeddings, or experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, GELU_TANH, HEAD_NORMS, Sizes, decoder, read_sizes
from slm_core.checkpoints.families.gemma3_text import local_base
from slm_core.checkpoints.families.gemma3n_text import (
    PER_LAYER_INSIDE,
    PER_LAYER_OUTSIDE,
    SANDWICH,
    without_shared_keys,
)
from slm_core.checkpoints.recipe import Part, Parts, Recipe, weights
from slm_core.checkpoints.rope import Positions, sliding_layers, stated_rope
from slm_core.errors import UnsupportedModel
from slm_core.gguf import PlainValue

_UNTURNED = 1e30  # a frequency divisor so large that nothing is rotated
_EXPERTS = {
    **weights(
        {
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
        }
    ),
    "ffn_gate_inp.scale": Part("router.scale"),
    "ffn_gate_up_exps.weight": Part("experts.gate_up_proj"),
    "ffn_down_exps.weight": Part("experts.down_proj"),
    "ffn_down_exps.scale": Part("router.per_expert_scale"),
}


def recipe(config: Config) -> Recipe:
    """Read a gemma4."""
    sizes = read_sizes(
        config,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131_072,
    )
    config.only("hidden_activation", *GELU_TANH)
    config.only("attention_bias", False)
    config.only("use_bidirectional_attention", "vision")  # for images only
    slides = sliding_layers(config, sizes.n_layers, lambda i: (i + 1) % 6 > 0)
    slides[-1] = False  # always, as in its class
    n_shared = config.count("num_kv_shared_layers", 0)
    metadata, positions = _keys(config, sizes, slides, n_shared)
    extra, outside = _extra(config, metadata)
    values_are_keys = config.flag("attention_k_eq_v", False)
    blocks = [
        {name: part for name, part in _block(extra).items() if slid or not values_are_keys or name != "attn_v.weight"}
        for slid in slides
    ]
    base = decoder(config, "gemma4", sizes, blocks, positions, tied=True, model=outside, metadata=metadata)
    return without_shared_keys(base, n_shared)


def _block(extra: Parts) -> Parts:
    scalar = {"layer_output_scale.weight": Part("layer_scalar")}
    return {**ATTENTION, **HEAD_NORMS, **GATED, **SANDWICH, **scalar, **extra}


def _keys(config: Config, sizes: Sizes, slides: list[bool], n_shared: int) -> tuple[dict[str, PlainValue], Positions]:
    """The keys of sizes that differ between layers, and the position embeddings."""
    n_ff, wide = int(str(sizes.metadata["feed_forward_length"])), config.flag("use_double_wide_mlp", False)
    first = len(slides) - n_shared
    n_kv_heads, head_dim = _heads(config, sizes, slides)
    keys: dict[str, PlainValue] = {
        "feed_forward_length": [n_ff * (2 if wide and i >= first else 1) for i in range(len(slides))],
        "attention.head_count_kv": [sizes.n_kv_heads if slid else n_kv_heads for slid in slides],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.key_length_swa": sizes.head_dim,
        "attention.value_length_swa": sizes.head_dim,
        "attention.sliding_window": config.size("sliding_window", 512),
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": n_shared,
        "final_logit_softcapping": config.number("final_logit_softcapping", 0.0),
        "rope.dimension_count_swa": sizes.head_dim,
        "rope.freq_base_swa": local_base(config),
    }
    return keys, _positions(config, head_dim)


def _heads(config: Config, sizes: Sizes, slides: list[bool]) -> tuple[int, int]:
    """The number of key heads of global layers, and their width: one value, or one per layer number."""
    n_kv_heads = config.size("num_global_key_value_heads", sizes.n_kv_heads)
    if not config.flag("attention_k_eq_v", False):
        n_kv_heads = sizes.n_kv_heads
    head_dim = config.size("global_head_dim", 512)
    if "per_layer_config" not in config:
        return n_kv_heads, head_dim
    by_layer = config.part("per_layer_config")
    heads = set()
    for index in (i for i, slid in enumerate(slides) if not slid):
        layer_config = by_layer.part(str(index))
        heads.add(
            (layer_config.size("num_key_value_heads", sizes.n_kv_heads), layer_config.size("head_dim", sizes.head_dim))
        )
    if len(heads) != 1:
        raise UnsupportedModel(
            f"{config.source}: 'per_layer_config' has layers that see everything with {str(sorted(heads))[:80]} heads"
            " and widths (accepted: the same of all)"
        )
    return heads.pop()


def _positions(config: Config, head_dim: int) -> Positions:
    """In global layers, most of a head is not rotated: GGUF expresses this with frequency divisors."""
    rope = stated_rope(config, 1e6, "full_attention")
    rope.where.only("rope_type", "proportional", "default")
    if "rope_parameters" not in config:
        rope = rope._replace(kind="proportional")
        share = 0.25
    else:
        share = rope.where.number("partial_rotary_factor", 1.0)
        if rope.kind == "default":
            rope.where.only("partial_rotary_factor", 1.0)  # its class ignores other values
    factor = rope.where.number("factor", 1.0) if rope.kind == "proportional" else 1.0
    n_turned = int(share * head_dim // 2)
    if not 0 <= n_turned <= head_dim // 2:
        raise UnsupportedModel(f"{config.source}: 'partial_rotary_factor' is {share} (accepted: 0 to 1)")
    divisors: NDArray[np.float32] = np.full(head_dim // 2, _UNTURNED, np.float32)
    divisors[:n_turned] = factor
    keys: dict[str, PlainValue] = {"rope.dimension_count": head_dim, "rope.freq_base": rope.freq_base}
    return Positions(keys, {"rope_freqs.weight": divisors})


def _extra(config: Config, metadata: dict[str, PlainValue]) -> tuple[Parts, Parts]:
    """Additional tensors of some models, in each block and outside; their sizes are added to ``metadata``."""
    inside: dict[str, Part] = {}
    outside: dict[str, Part] = {}
    width = config.count("hidden_size_per_layer_input", 256)
    metadata["embedding_length_per_layer_input"] = width
    config.neutral("vocab_size_per_layer_input")  # shapes are checked
    if width:
        inside |= PER_LAYER_INSIDE
        outside |= PER_LAYER_OUTSIDE
    if config.flag("enable_moe_block", False):
        inside |= _EXPERTS
        metadata["expert_count"] = config.size("num_experts", largest=MAX_PARTS)
        metadata["expert_used_count"] = config.size("top_k_experts")
        metadata["expert_feed_forward_length"] = config.size("moe_intermediate_size")
    else:
        config.neutral("num_experts", "top_k_experts", "moe_intermediate_size")
    return inside, outside
