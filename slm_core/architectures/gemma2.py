"""gemma2: a gemma with additional post-norms, soft-capped scores and logits, and a window in every other layer."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope, read_windows
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import Sizes, read_sizes
from slm_core.architectures._spec import Activation, LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import Table, llama_block, norms

_LAYERS_OF_27B = 46


def spec(keys: Keys) -> ModelSpec:
    """Read a gemma2; the defaults of the window and the soft-caps are from the published models."""
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT, default_freq_base=10_000.0)
    block, windows = sandwiched_block(sizes), read_windows(keys, sizes.n_layers, period=2, default=4096)
    layers = [LayerSpec(block, rope, window, activation=Activation.GELU_TANH) for window in windows]
    return decoder_spec(
        keys,
        sizes,
        layers,
        embedding_scale=sizes.n_embd**0.5,
        attention_scale=attention_scale(sizes, _LAYERS_OF_27B),
        attention_softcap=keys.number("attn_logit_softcapping", 50.0),
        logit_softcap=keys.number("final_logit_softcapping", 30.0),
    )


def sandwiched_block(sizes: Sizes) -> Table:
    """A block with norms before and after its attention and feed-forward layers."""
    return llama_block(sizes) | norms(sizes.n_embd, "post_attention_norm", "post_ffw_norm")


def attention_scale(sizes: Sizes, n_layers_of_27b: int) -> float:
    """The scale of scores: from D, but from E / H in the 27B model; files have no key for it."""
    width = sizes.n_embd / sizes.n_heads if sizes.n_layers == n_layers_of_27b else sizes.head_dim
    return float(width**-0.5)
