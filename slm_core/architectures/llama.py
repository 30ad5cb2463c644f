"""llama: Llama 1 to 3, Mistral, SmolLM, Mixtral and others. Rows of Q and K are permuted for interleaved RoPE pairs."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, long_rope, read_rope, rope_factors
from slm_core.architectures._experts import read_experts
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import Table, attention, biases, experts, gated, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a llama; without the key ``rope.freq_base`` the base is 10,000, as in the GGUF specification."""
    sizes, outside = read_sizes(keys), Table()
    rope = read_rope(keys, sizes.head_dim, RopeStyle.INTERLEAVED, default_freq_base=10_000.0)
    rope = long_rope(keys, rope_factors(rope, outside), outside)
    keys.only("tensor_data_layout", "Meta AI original pth")  # the layout that this file describes
    block = norms(sizes.n_embd, "attn_norm", "ffn_norm") | attention(sizes)
    block |= biases(block, "attn_q", "attn_k", "attn_v", "attn_output", required=False)
    window = keys.count("attention.sliding_window", 0) or None  # of the first Mistral
    if keys.count("expert_count", 0):
        moe = read_experts(keys, normalized=True)
        layer = LayerSpec(block | experts(sizes, moe.n_experts, sizes.n_ff), rope, window, experts=moe)
    else:
        dense = gated(sizes)
        layer = LayerSpec(block | dense | biases(dense, required=False), rope, window)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers, outside)
