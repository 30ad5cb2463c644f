"""gpt-oss: experts with biases and a clamped gate, attention sinks, a window in every other layer, YaRN."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope, read_windows
from slm_core.architectures._experts import read_experts
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Activation, Gating, LayerSpec, ModelSpec, RopeStyle, TensorSpec
from slm_core.architectures._tables import attention, biases, experts, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a gpt-oss."""
    sizes = read_sizes(keys, "expert_feed_forward_length")
    keys.neutral("feed_forward_length")
    moe = read_experts(keys, normalized=False, gating=Gating.SOFTMAX_OF_CHOSEN)
    block = attention(sizes) | experts(sizes, moe.n_experts, sizes.n_ff)
    block |= biases(block, "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp")
    block |= {f"ffn_{name}_exps.bias": TensorSpec((moe.n_experts, sizes.n_ff)) for name in ("gate", "up")}
    block["ffn_down_exps.bias"] = TensorSpec((moe.n_experts, sizes.n_embd))
    block |= norms(sizes.n_embd, "attn_norm", "post_attention_norm") | norms(sizes.n_heads, "attn_sinks")
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT)
    keys.size("attention.sliding_window")  # every published file has it
    layers = [
        LayerSpec(
            block,
            rope,
            window,
            activation=Activation.SWIGLU_CLAMPED,
            experts=moe,
            ffn_norm="post_attention_norm",
        )
        for window in read_windows(keys, sizes.n_layers, period=2)
    ]
    return decoder_spec(keys, sizes, layers)
