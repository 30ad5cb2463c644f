"""phi2: Phi 1, 1.5 and 2. Layer norms and biases, parallel attention and feed-forward after one norm, no gate."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Activation, LayerSpec, ModelSpec, NormKind, RopeStyle
from slm_core.architectures._tables import biases, fused_attention, linear, norms, ungated


def spec(keys: Keys) -> ModelSpec:
    """Read a phi2."""
    sizes = read_sizes(keys)
    block = fused_attention(keys, sizes) | ungated(sizes) | norms(sizes.n_embd, "attn_norm")
    block |= biases(block)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT, default_freq_base=10_000.0)
    layer = LayerSpec(block, rope, activation=Activation.GELU_TANH)
    outside = norms(sizes.n_embd, "output_norm") | linear("output", (sizes.n_vocab, sizes.n_embd))
    outside |= biases(outside)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers, outside, norm=NormKind.LAYER, parallel=True)
