"""arcee: AFM. A llama whose feed-forward layer has no gate and squares a ReLU."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope, rope_factors
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import Activation, LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import Table, attention, norms, ungated


def spec(keys: Keys) -> ModelSpec:
    """Read an arcee."""
    sizes, outside = read_sizes(keys), Table()
    rope = rope_factors(read_rope(keys, sizes.head_dim, RopeStyle.INTERLEAVED), outside)
    block = attention(sizes) | ungated(sizes) | norms(sizes.n_embd, "attn_norm", "ffn_norm")
    layer = LayerSpec(block, rope, activation=Activation.RELU_SQUARED)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers, outside)
