"""modern-bert: ModernBERT. Pre-norms, gates, no biases; sliding windows in two layers of three."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures._decoder import encoder_spec, read_rope, read_windows
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Activation, LayerSpec, ModelSpec, NormKind, RopeStyle
from slm_core.architectures._tables import fused_attention, linear, norms, rank_head


def spec(keys: Keys) -> ModelSpec:
    """Read a modern-bert, whose first layer has no norm before attention."""
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT)
    local = replace(rope, freq_base=keys.number("rope.freq_base_swa", 10_000.0), factor=1.0)
    block = fused_attention(keys, sizes) | norms(sizes.n_embd, "ffn_norm")
    block |= linear("ffn_up", (2 * sizes.n_ff, sizes.n_embd)) | linear("ffn_down", (sizes.n_embd, sizes.n_ff))
    normed = block | norms(sizes.n_embd, "attn_norm")
    windows = read_windows(keys, sizes.n_layers, period=3, first=True)
    layers = [
        LayerSpec(normed if i else block, local if window else rope, window, activation=Activation.GELU)
        for i, window in enumerate(windows)
    ]
    outside = norms(sizes.n_embd, "token_embd_norm") | rank_head(keys, sizes)
    return encoder_spec(keys, sizes, layers, outside, norm=NormKind.LAYER)
