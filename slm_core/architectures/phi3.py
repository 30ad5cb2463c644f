"""phi3: Phi 3, 3.5 and 4. A llama with fused matrices and half-split RoPE; models for long contexts have LongRoPE."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, long_rope, read_rope, rope_factors
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import Table, fused_attention, linear, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a phi3; llama.cpp does not apply the window that some files have."""
    sizes, outside = read_sizes(keys), Table()
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT, default_freq_base=10_000.0)
    rope = long_rope(keys, rope_factors(rope, outside), outside)
    block = fused_attention(keys, sizes) | norms(sizes.n_embd, "attn_norm", "ffn_norm")
    block |= linear("ffn_up", (2 * sizes.n_ff, sizes.n_embd)) | linear("ffn_down", (sizes.n_embd, sizes.n_ff))
    layer = LayerSpec(block, rope, keys.count("attention.sliding_window", 0) or None)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers, outside)
