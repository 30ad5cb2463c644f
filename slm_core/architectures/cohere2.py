"""cohere2: Command R7B and A. A command-r with windows in three layers of four; the others have no positions."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope, read_windows
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, NormKind, RopeStyle
from slm_core.architectures._tables import attention, gated, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a cohere2."""
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.INTERLEAVED)
    block = attention(sizes) | gated(sizes) | norms(sizes.n_embd, "attn_norm")
    keys.size("attention.sliding_window")  # without it, the layers with positions are unknown
    windows = read_windows(keys, sizes.n_layers, period=4)
    layers = [LayerSpec(block, None if window is None else rope, window) for window in windows]
    return decoder_spec(keys, sizes, layers, norm=NormKind.LAYER, parallel=True, logit_scale=keys.number("logit_scale"))
