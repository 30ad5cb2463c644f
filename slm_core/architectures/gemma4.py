"""gemma4: other heads in sliding-window layers; per-layer embeddings, shared keys, or routed experts."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures._decoder import ROPE_FACTORS, decoder_spec, read_rope, read_windows
from slm_core.architectures._experts import read_experts
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import Sizes, read_n_layers, read_sizes_by_layer
from slm_core.architectures._spec import Activation, ExpertsSpec, LayerSpec, ModelSpec, RopeSpec, RopeStyle, TensorSpec
from slm_core.architectures._tables import Table, fused_experts, norms
from slm_core.architectures.gemma2 import sandwiched_block
from slm_core.architectures.gemma3n import per_layer_inside, per_layer_outside, share_keys


def spec(keys: Keys) -> ModelSpec:
    """Read a gemma4. If a global layer has no value matrix, its values are the keys before their norm."""
    windows = read_windows(keys, read_n_layers(keys), period=6)
    sizes = read_sizes_by_layer(keys, [window is not None for window in windows])
    wide, narrow = _ropes(keys, windows, sizes)
    width = keys.count("embedding_length_per_layer_input", 0)
    experts = read_experts(keys, normalized=True) if keys.count("expert_count", 0) else None
    layers = [
        LayerSpec(
            _block(keys, each, window, width, experts),
            wide if window is None else narrow,
            window,
            activation=Activation.GELU_TANH,
            experts=experts,
            plain_norms=("attn_v_norm",),
            n_kv_heads=each.n_kv_heads,
            head_dim=each.head_dim,
        )
        for window, each in zip(windows, sizes, strict=True)
    ]
    outside = per_layer_outside(sizes[0], width) if width else {}
    if wide.factors is not None:
        outside[ROPE_FACTORS] = TensorSpec((wide.n_dims // 2,))
    return decoder_spec(
        keys,
        sizes[0],
        share_keys(keys, layers, keys.count("attention.shared_kv_layers", 0)),
        outside,
        embedding_scale=sizes[0].n_embd ** 0.5,
        scales_rows=False,
        attention_scale=1.0,
        logit_softcap=keys.number("final_logit_softcapping", 0.0, zero=True) or None,
        layer_embedding_width=width or None,
    )


def _ropes(keys: Keys, windows: list[int | None], sizes: list[Sizes]) -> tuple[RopeSpec, RopeSpec]:
    """RoPE of global layers, whose table leaves most of a head unrotated, and of sliding-window layers."""
    whole, part = (
        next((each.head_dim for each, window in zip(sizes, windows, strict=True) if (window is None) is is_global), 0)
        for is_global in (True, False)
    )
    rope = read_rope(keys, whole or part, RopeStyle.HALF_SPLIT)
    n_dims = keys.size("rope.dimension_count_swa", part or whole, largest=part or whole)
    local = replace(rope, n_dims=n_dims, freq_base=keys.number("rope.freq_base_swa", 10_000.0), factor=1.0)
    return replace(rope, factors=ROPE_FACTORS if whole else None), local


def _block(keys: Keys, sizes: Sizes, window: int | None, width: int, experts: ExpertsSpec | None) -> Table:
    table = sandwiched_block(sizes) | norms(sizes.head_dim, "attn_q_norm", "attn_k_norm")
    if window is None:
        table["attn_v.weight"] = replace(table["attn_v.weight"], required=False)
    if width:
        table |= per_layer_inside(sizes, width)
    if experts is not None:
        table |= fused_experts(sizes, experts.n_experts, keys.size("expert_feed_forward_length"))
        table |= norms(sizes.n_embd, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
        table["ffn_gate_inp.scale"] = TensorSpec((sizes.n_embd,))
    return table | {"layer_output_scale.weight": TensorSpec((1,), required=False)}
