"""exaone4: EXAONE 4. Norms after attention and feed-forward layers, and per-head norms.

In the large model, three layers of four have windows, and the others have no position embedding.
"""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope, read_windows, rope_factors
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import Table, attention, gated, norms


def spec(keys: Keys) -> ModelSpec:
    """Read an exaone4."""
    sizes, outside = read_sizes(keys), Table()
    rope = rope_factors(read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT), outside)
    block = attention(sizes) | gated(sizes) | norms(sizes.n_embd, "post_attention_norm", "post_ffw_norm")
    block |= norms(sizes.head_dim, "attn_q_norm", "attn_k_norm")
    windows = read_windows(keys, sizes.n_layers, period=4)
    slides = any(window is not None for window in windows)
    layers = [LayerSpec(block, rope if window or not slides else None, window) for window in windows]
    return decoder_spec(keys, sizes, layers, outside)
