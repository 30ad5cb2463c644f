"""nomic-bert: a bert with half-split RoPE, gated feed-forward layers, and biases in norms only."""

from __future__ import annotations

from slm_core.architectures._decoder import encoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, NormKind, RopeStyle
from slm_core.architectures._tables import biases, embedding_of_texts, fused_attention, gated, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a nomic-bert."""
    sizes = read_sizes(keys)
    after = norms(sizes.n_embd, "attn_output_norm", "layer_output_norm")
    block = fused_attention(keys, sizes) | gated(sizes) | after | biases(after)
    layer = LayerSpec(block, read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT))
    outside = embedding_of_texts(keys, sizes)
    return encoder_spec(keys, sizes, [layer] * sizes.n_layers, outside, norm=NormKind.LAYER, output_norm="")
