"""mamba2: Mamba 2, Codestral Mamba. Each block is one selective state space layer with heads."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes_without_attention
from slm_core.architectures._spec import LayerSpec, ModelSpec
from slm_core.architectures._states import read_mamba2
from slm_core.architectures._tables import mamba2, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a mamba2."""
    sizes, recurrent = read_sizes_without_attention(keys), read_mamba2(keys)
    block = norms(sizes.n_embd, "attn_norm") | mamba2(sizes, recurrent)
    layer = LayerSpec(block, rope=None, attends=False, recurrent=recurrent)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers)
