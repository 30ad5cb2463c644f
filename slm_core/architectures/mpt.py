"""mpt: ALiBi, layer norms without biases, no gate, no biases; in some, clipped queries, keys and values."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Activation, LayerSpec, ModelSpec, NormKind
from slm_core.architectures._tables import fused_attention, norms, ungated


def spec(keys: Keys) -> ModelSpec:
    """Read an mpt."""
    sizes = read_sizes(keys)
    block = fused_attention(keys, sizes) | ungated(sizes) | norms(sizes.n_embd, "attn_norm", "ffn_norm")
    layer = LayerSpec(block, None, activation=Activation.GELU)
    return decoder_spec(
        keys,
        sizes,
        [layer] * sizes.n_layers,
        norm=NormKind.LAYER,
        alibi_max_bias=keys.number("attention.max_alibi_bias"),
        qkv_limit=keys.number("attention.clamp_kqv", 0.0, zero=True) or None,
    )
