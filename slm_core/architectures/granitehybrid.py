"""granitehybrid: Granite 4 H, Bamba. A granite with Mamba 2 instead of attention in most blocks."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures._experts import read_experts
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import Sizes, read_hybrid_sizes
from slm_core.architectures._spec import ExpertsSpec, LayerSpec, ModelSpec
from slm_core.architectures._states import read_mamba2
from slm_core.architectures._tables import Table, experts, gated, mamba2, norms, shared_expert
from slm_core.architectures.granite import granite_attention, granite_decoder


def spec(keys: Keys) -> ModelSpec:
    """Read a granitehybrid; blocks without key heads are recurrent."""
    sizes, attends = read_hybrid_sizes(keys)
    outside, recurrent = Table(), read_mamba2(keys)
    feed_forward, moe = _feed_forward(keys, sizes)
    attention_layer = granite_attention(keys, sizes, outside)
    attention_layer = replace(attention_layer, tensors={**attention_layer.tensors, **feed_forward}, experts=moe)
    block = norms(sizes.n_embd, "attn_norm", "ffn_norm") | mamba2(sizes, recurrent) | feed_forward
    recurrent_layer = LayerSpec(block, None, attends=False, recurrent=recurrent, experts=moe)
    return granite_decoder(
        keys, sizes, [attention_layer if has_keys else recurrent_layer for has_keys in attends], outside
    )


def _feed_forward(keys: Keys, sizes: Sizes) -> tuple[Table, ExpertsSpec | None]:
    """Routed experts and a shared expert; or only the shared one, as a dense layer."""
    if not keys.count("expert_count", 0):
        keys.neutral("expert_used_count")
        keys.only("expert_shared_feed_forward_length", 0, sizes.n_ff)
        return gated(sizes), None
    moe = read_experts(keys, normalized=True)
    table = experts(sizes, moe.n_experts, sizes.n_ff)
    if n_shared := keys.count("expert_shared_feed_forward_length", 0):
        table |= shared_expert(sizes, n_shared)
    return table, moe
