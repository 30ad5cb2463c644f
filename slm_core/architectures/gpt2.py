"""gpt2: learned positions, layer norms, biases everywhere, no gate."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import POSITIONS, Activation, LayerSpec, ModelSpec, NormKind, TensorSpec
from slm_core.architectures._tables import biases, fused_attention, norms, ungated


def spec(keys: Keys) -> ModelSpec:
    """Read a gpt2."""
    sizes = read_sizes(keys)
    block = fused_attention(keys, sizes) | ungated(sizes) | norms(sizes.n_embd, "attn_norm", "ffn_norm")
    layer = LayerSpec(block | biases(block), None, activation=Activation.GELU_TANH)
    outside = biases(norms(sizes.n_embd, "output_norm"))
    outside[POSITIONS] = TensorSpec((keys.size("context_length"), sizes.n_embd))
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers, outside, norm=NormKind.LAYER)
