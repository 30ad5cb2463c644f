"""gemma3: pre-norms, post-norms and per-head norms; five layers of six have windows, with another RoPE."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures._decoder import decoder_spec, read_rope, read_windows
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Activation, LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import norms
from slm_core.architectures.gemma2 import attention_scale, sandwiched_block

_LAYERS_OF_27B = 62


def spec(keys: Keys) -> ModelSpec:
    """Read a gemma3; the defaults of positions and soft-caps are from the published models."""
    return _spec(keys, causal=True)


def embedding_spec(keys: Keys) -> ModelSpec:
    """Read an encoder of the same layers, with symmetric windows."""
    return _spec(keys, causal=False)


def _spec(keys: Keys, *, causal: bool) -> ModelSpec:
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT, default_freq_base=1e6)
    local = replace(rope, freq_base=keys.number("rope.freq_base_swa", 10_000.0), factor=1.0)
    block = sandwiched_block(sizes) | norms(sizes.head_dim, "attn_q_norm", "attn_k_norm")
    windows = read_windows(keys, sizes.n_layers, period=6)
    layers = [
        LayerSpec(block, rope if window is None else local, window, activation=Activation.GELU_TANH)
        for window in windows
    ]
    return decoder_spec(
        keys,
        sizes,
        layers,
        embedding_scale=sizes.n_embd**0.5,
        scales_rows=False,
        attention_scale=attention_scale(sizes, _LAYERS_OF_27B),
        logit_softcap=keys.number("final_logit_softcapping", 0.0, zero=True) or None,
        causal=causal,
    )
