"""phimoe: Phi 3.5 MoE. A phi3 with two experts for each token, layer norms, and biases outside the experts."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures._decoder import decoder_spec, long_rope, read_rope
from slm_core.architectures._experts import read_experts
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Gating, LayerSpec, ModelSpec, NormKind, RopeStyle, TensorSpec
from slm_core.architectures._tables import attention, biases, experts, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a phimoe; files use the key of RMS norms for the epsilon, because llama.cpp applies RMS norms."""
    sizes = read_sizes(keys)
    outside = norms(sizes.n_embd, "output_norm")
    outside |= biases(outside) | {"output.bias": TensorSpec((sizes.n_vocab,))}
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT, default_freq_base=10_000.0)
    rope = long_rope(keys, rope, outside)
    moe = read_experts(keys, normalized=False, gating=Gating.SPARSE_MIXER)
    block = norms(sizes.n_embd, "attn_norm", "ffn_norm") | attention(sizes)
    block |= biases(block) | experts(sizes, moe.n_experts, sizes.n_ff)
    layer = LayerSpec(block, rope, keys.count("attention.sliding_window", 0) or None, experts=moe)
    return replace(decoder_spec(keys, sizes, [layer] * sizes.n_layers, outside), norm=NormKind.LAYER)
