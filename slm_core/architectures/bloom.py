"""bloom: ALiBi, a norm after the embedding, layer norms, biases everywhere, no gate."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Activation, LayerSpec, ModelSpec, NormKind
from slm_core.architectures._tables import biases, fused_attention, norms, ungated

_MAX_BIAS = 8.0  # from the paper; files have no key for it


def spec(keys: Keys) -> ModelSpec:
    """Read a bloom."""
    sizes = read_sizes(keys)
    block = fused_attention(keys, sizes) | ungated(sizes) | norms(sizes.n_embd, "attn_norm", "ffn_norm")
    layer = LayerSpec(block | biases(block), None, activation=Activation.GELU_TANH)
    outside = norms(sizes.n_embd, "token_embd_norm", "output_norm")
    outside |= biases(outside)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers, outside, norm=NormKind.LAYER, alibi_max_bias=_MAX_BIAS)
