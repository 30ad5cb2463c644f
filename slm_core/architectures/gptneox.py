"""gptneox: Pythia and others. Layer norms, biases everywhere, partial RoPE, parallel attention and feed-forward."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Activation, LayerSpec, ModelSpec, NormKind, RopeStyle
from slm_core.architectures._tables import biases, fused_attention, norms, ungated


def spec(keys: Keys) -> ModelSpec:
    """Read a gptneox."""
    sizes = read_sizes(keys)
    block = fused_attention(keys, sizes) | ungated(sizes) | norms(sizes.n_embd, "attn_norm", "ffn_norm")
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT, default_freq_base=10_000.0)
    layer = LayerSpec(block | biases(block), rope, activation=Activation.GELU)
    return decoder_spec(
        keys,
        sizes,
        [layer] * sizes.n_layers,
        biases(norms(sizes.n_embd, "output_norm")),
        norm=NormKind.LAYER,
        parallel=keys.flag("use_parallel_residual", True),
    )
