"""jamba: attention without positions in a few blocks, Mamba in the others, experts in some blocks."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures._decoder import decoder_spec
from slm_core.architectures._experts import read_experts
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import Sizes, read_hybrid_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec
from slm_core.architectures._states import read_mamba
from slm_core.architectures._tables import attention, experts, gated, mamba, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a jamba; blocks without key heads are recurrent, blocks with a router have experts."""
    sizes, attends = read_hybrid_sizes(keys)
    recurrent = read_mamba(keys)
    recurrent_tensors = mamba(sizes, recurrent) | norms(recurrent.n_rank, "ssm_dt_norm")
    recurrent_tensors |= norms(recurrent.n_state, "ssm_b_norm", "ssm_c_norm")
    layers = [
        LayerSpec(attention(sizes), None)
        if has_keys
        else LayerSpec(recurrent_tensors, None, attends=False, recurrent=recurrent)
        for has_keys in attends
    ]
    return decoder_spec(keys, sizes, [_with_feed_forward(keys, sizes, layer, i) for i, layer in enumerate(layers)])


def _with_feed_forward(keys: Keys, sizes: Sizes, layer: LayerSpec, index: int) -> LayerSpec:
    """``layer``, its norms and its feed-forward layer."""
    tensors = {**layer.tensors, **norms(sizes.n_embd, "attn_norm", "ffn_norm")}
    if keys.count("expert_count", 0) and f"blk.{index}.ffn_gate_inp.weight" in keys.gguf.tensors:
        moe = read_experts(keys, normalized=False)
        return replace(layer, tensors=tensors | experts(sizes, moe.n_experts, sizes.n_ff), experts=moe)
    keys.neutral("expert_used_count")
    return replace(layer, tensors=tensors | gated(sizes))
