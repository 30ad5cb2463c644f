"""llama4: text models of Scout and Maverick. Chunked attention; every fourth layer is global, without positions."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures._decoder import decoder_spec, read_rope, rope_factors
from slm_core.architectures._experts import read_experts
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Gating, LayerSpec, ModelSpec, RopeStyle, TemperatureSpec
from slm_core.architectures._tables import Table, attention, experts, gated, norms, shared_expert

CHUNK, TEMPERATURE_LENGTH, TEMPERATURE_SCALE = 8192, 8192, 0.1  # files have no keys for these
_NOPE_STEP = 4
_EXPERTS_WITHOUT_NORMS = 128  # Maverick, without norms of queries and keys; files have no key for it


def spec(keys: Keys) -> ModelSpec:
    """Read a llama4."""
    sizes, outside = read_sizes(keys), Table()
    rope = rope_factors(read_rope(keys, sizes.head_dim, RopeStyle.INTERLEAVED), outside)
    keys.only("attention.sliding_window", CHUNK)
    moe = replace(read_experts(keys, normalized=False, gating=Gating.SIGMOID), scales_input=True)
    n_ff, step = keys.size("expert_feed_forward_length"), keys.size("interleave_moe_layer_step")
    block = attention(sizes) | norms(sizes.n_embd, "attn_norm", "ffn_norm")
    dense = LayerSpec(block | gated(sizes), rope)
    tables = experts(sizes, moe.n_experts, n_ff) | shared_expert(sizes, n_ff)
    routed = replace(dense, tensors=block | tables, experts=moe)
    head_norms = () if moe.n_experts == _EXPERTS_WITHOUT_NORMS else ("attn_q_norm", "attn_k_norm")
    layers = [
        _with_positions(routed if (i + 1) % step == 0 else dense, head_norms, is_global=(i + 1) % _NOPE_STEP == 0)
        for i in range(sizes.n_layers)
    ]
    return decoder_spec(keys, sizes, layers, outside)


def _with_positions(layer: LayerSpec, head_norms: tuple[str, ...], *, is_global: bool) -> LayerSpec:
    """The positions of a layer. RoPE rotates whole heads, so a norm after it equals a norm before it."""
    if is_global:
        temperature = TemperatureSpec(TEMPERATURE_SCALE, TEMPERATURE_LENGTH, offset=1)
        return replace(layer, rope=None, temperature=temperature)
    return replace(layer, chunk=CHUNK, plain_norms=head_norms)
