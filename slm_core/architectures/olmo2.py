"""olmo2: OLMo 2 and 3. Norms after attention and feed-forward layers, and over all queries and all keys.

OLMo 3 has windows in three layers of four; these layers have no RoPE scaling.
"""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures._decoder import decoder_spec, read_rope, read_windows
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import attention, gated, norms


def spec(keys: Keys) -> ModelSpec:
    """Read an olmo2."""
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT)
    local = replace(rope, factor=1.0, yarn=None, magnitude=1.0)
    block = attention(sizes) | gated(sizes) | norms(sizes.n_embd, "post_attention_norm", "post_ffw_norm")
    block |= norms(sizes.n_q, "attn_q_norm") | norms(sizes.n_kv, "attn_k_norm")
    windows = read_windows(keys, sizes.n_layers, period=4)
    layers = [LayerSpec(block, rope if window is None else local, window) for window in windows]
    return decoder_spec(keys, sizes, layers)
