"""qwen3moe: a qwen3 with experts in place of its feed-forward layers."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._experts import read_experts
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import attention, experts, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a qwen3moe."""
    sizes, moe = read_sizes(keys), read_experts(keys, normalized=True)
    block = norms(sizes.n_embd, "attn_norm", "ffn_norm") | attention(sizes)
    block |= norms(sizes.head_dim, "attn_q_norm", "attn_k_norm")
    block |= experts(sizes, moe.n_experts, keys.size("expert_feed_forward_length", sizes.n_ff))
    layer = LayerSpec(block, read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT), experts=moe)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers)
