"""gemma: Gemma 1. Embeddings times the root of their width, GELU gates, half-split RoPE; files add 1 to norms."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Activation, LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import llama_block


def spec(keys: Keys) -> ModelSpec:
    """Read a gemma."""
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT, default_freq_base=10_000.0)
    layer = LayerSpec(llama_block(sizes), rope, activation=Activation.GELU_TANH)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers, embedding_scale=sizes.n_embd**0.5)
