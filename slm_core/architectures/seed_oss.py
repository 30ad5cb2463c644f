"""seed_oss: Seed-OSS. A llama with half-split RoPE; the norm of its feed-forward layer has another name."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import attention, biases, gated, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a seed_oss."""
    sizes = read_sizes(keys)
    block = attention(sizes) | gated(sizes) | norms(sizes.n_embd, "attn_norm", "post_attention_norm")
    block |= biases(block, "attn_q", "attn_k", "attn_v", required=False)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT)
    layer = LayerSpec(block, rope, ffn_norm="post_attention_norm")
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers)
