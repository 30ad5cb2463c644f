"""starcoder2: layer norms, biases everywhere, half-split RoPE, no gate."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Activation, LayerSpec, ModelSpec, NormKind, RopeStyle
from slm_core.architectures._tables import attention, biases, norms, ungated


def spec(keys: Keys) -> ModelSpec:
    """Read a starcoder2."""
    sizes = read_sizes(keys)
    block = attention(sizes) | ungated(sizes) | norms(sizes.n_embd, "attn_norm", "ffn_norm")
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT)
    window = keys.count("attention.sliding_window", 0) or None
    layer = LayerSpec(block | biases(block), rope, window, activation=Activation.GELU_TANH)
    outside = biases(norms(sizes.n_embd, "output_norm"))
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers, outside, norm=NormKind.LAYER)
