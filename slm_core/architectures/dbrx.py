"""dbrx: experts, layer norms without biases, clipped queries, keys and values."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._experts import read_experts
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, NormKind, RopeStyle
from slm_core.architectures._tables import experts, fused_attention, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a dbrx."""
    sizes, moe = read_sizes(keys), read_experts(keys, normalized=True)
    block = fused_attention(keys, sizes) | norms(sizes.n_embd, "attn_norm", "attn_output_norm")
    block |= experts(sizes, moe.n_experts, sizes.n_ff)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT)
    layer = LayerSpec(block, rope, experts=moe, ffn_norm="attn_output_norm")
    limit = keys.number("attention.clamp_kqv", 0.0, zero=True) or None
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers, norm=NormKind.LAYER, qkv_limit=limit)
