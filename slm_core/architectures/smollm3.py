"""smollm3: a llama in which every fourth layer has no position embedding (NoPE)."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope, rope_factors
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import Table, llama_block

_NOPE_STEP = 4  # files have no key for it


def spec(keys: Keys) -> ModelSpec:
    """Read a smollm3."""
    sizes, outside = read_sizes(keys), Table()
    rope = rope_factors(read_rope(keys, sizes.head_dim, RopeStyle.INTERLEAVED), outside)
    block = llama_block(sizes)
    layers = [LayerSpec(block, rope if (i + 1) % _NOPE_STEP else None) for i in range(sizes.n_layers)]
    return decoder_spec(keys, sizes, layers, outside)
