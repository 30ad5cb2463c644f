"""qwen2moe: Qwen1.5 and Qwen2 with routed experts and a gated shared expert."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._experts import read_experts
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle, TensorSpec
from slm_core.architectures._tables import attention, biases, experts, norms, shared_expert


def spec(keys: Keys) -> ModelSpec:
    """Read a qwen2moe; the default width of experts is the feed-forward width divided by the experts per token."""
    sizes, moe = read_sizes(keys), read_experts(keys, normalized=False)
    n_ff = keys.size("expert_feed_forward_length", max(1, sizes.n_ff // moe.n_used))
    n_shared = keys.size("expert_shared_feed_forward_length", sizes.n_ff)
    block = norms(sizes.n_embd, "attn_norm", "ffn_norm") | attention(sizes)
    block |= biases(block, "attn_q", "attn_k", "attn_v")
    block |= experts(sizes, moe.n_experts, n_ff) | shared_expert(sizes, n_shared)
    block["ffn_gate_inp_shexp.weight"] = TensorSpec((sizes.n_embd,))
    layer = LayerSpec(block, read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT), experts=moe)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers)
