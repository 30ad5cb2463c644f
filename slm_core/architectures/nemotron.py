"""nemotron: Minitron and Nemotron 4. Layer norms, partial RoPE, no gate, squared ReLU."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Activation, LayerSpec, ModelSpec, NormKind, RopeStyle
from slm_core.architectures._tables import attention, biases, norms, ungated


def spec(keys: Keys) -> ModelSpec:
    """Read a nemotron; files add 1 to its norms."""
    sizes = read_sizes(keys)
    before = norms(sizes.n_embd, "attn_norm", "ffn_norm")
    matrices = attention(sizes) | ungated(sizes)
    block = before | biases(before) | matrices | biases(matrices, required=False)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT)
    layer = LayerSpec(block, rope, activation=Activation.RELU_SQUARED)
    outside = biases(norms(sizes.n_embd, "output_norm"))
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers, outside, norm=NormKind.LAYER)
