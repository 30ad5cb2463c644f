"""qwen3: Qwen3, dense. RMS norms on the queries and keys of each head; half-split RoPE; no biases."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import llama_block, norms, rank_head


def spec(keys: Keys) -> ModelSpec:
    """Read a qwen3."""
    sizes = read_sizes(keys)
    block = llama_block(sizes) | norms(sizes.head_dim, "attn_q_norm", "attn_k_norm")
    layer = LayerSpec(block, read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT))
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers, rank_head(keys, sizes))
