"""glm4moe: GLM 4.5. Routed and shared experts after dense blocks, RoPE on half of a head, a layer for MTP."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._experts import routed
from slm_core.architectures._keys import Keys
from slm_core.architectures._mtp import mtp_layers, without_mtp_layers
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Gating, LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import attention, biases, gated, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a glm4moe."""
    whole = read_sizes(keys)
    sizes, n_mtp = without_mtp_layers(keys, whole)
    block = attention(sizes) | norms(sizes.n_embd, "attn_norm", "post_attention_norm")
    block |= biases(block, "attn_q", "attn_k", "attn_v", required=False)
    block |= norms(sizes.head_dim, "attn_q_norm", "attn_k_norm", required=False)
    plain = LayerSpec(block, read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT), ffn_norm="post_attention_norm")
    n_dense = min(keys.count("leading_dense_block_count", 0), whole.n_layers)
    layers = [replace(plain, tensors={**block, **gated(sizes)})] * n_dense
    if n_dense < whole.n_layers:
        layers += [routed(keys, sizes, plain, Gating.SIGMOID)] * (whole.n_layers - n_dense)
    extra = mtp_layers(keys, sizes, layers[-1], n_mtp)
    return decoder_spec(keys, sizes, layers[: sizes.n_layers], mtp_layers=extra)
