"""qwen2: Qwen2 and Qwen2.5. Biases on queries, keys and values; half-split RoPE."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import biases, llama_block


def spec(keys: Keys) -> ModelSpec:
    """Read a qwen2."""
    sizes = read_sizes(keys)
    block = llama_block(sizes)
    block |= biases(block, "attn_q", "attn_k", "attn_v")
    layer = LayerSpec(block, read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT))
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers)
