"""falcon: Falcon 7B, 40B and 180B. Parallel attention and feed-forward, layer norms, no gate; two norms from 40B on."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Activation, LayerSpec, ModelSpec, NormKind, RopeStyle
from slm_core.architectures._tables import biases, fused_attention, norms, ungated


def spec(keys: Keys) -> ModelSpec:
    """Read a falcon; if there are two norms, ``attn_norm_2`` is attention's."""
    sizes = read_sizes(keys)
    keys.only("tensor_data_layout", "jploski")  # queries, then keys, then values, as in other models
    before = norms(sizes.n_embd, "attn_norm")
    if "blk.0.attn_norm_2.weight" in keys.gguf.tensors:
        before |= norms(sizes.n_embd, "attn_norm_2")
    block = fused_attention(keys, sizes) | ungated(sizes) | before | biases(before)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT, default_freq_base=10_000.0)
    layer = LayerSpec(block, rope, activation=Activation.GELU)
    outside = biases(norms(sizes.n_embd, "output_norm"))
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers, outside, norm=NormKind.LAYER, parallel=True)
