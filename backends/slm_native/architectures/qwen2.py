"""qwen2: Qwen2 and Qwen2.5. Biases on queries, keys and values; half-split RoPE."""

from __future__ import annotations

from slm_native.architectures._decoder import decoder_spec, read_rope, read_sizes
from slm_native.kernels import RopeStyle
from slm_native.keys import Keys
from slm_native.spec import ModelSpec


def spec(keys: Keys) -> ModelSpec:
    """Read a qwen2."""
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT)
    return decoder_spec(keys, sizes, rope, biases=("attn_q", "attn_k", "attn_v"))
