"""exaone: EXAONE 3 and 3.5. A llama with half-split RoPE."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope, rope_factors
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import Table, llama_block


def spec(keys: Keys) -> ModelSpec:
    """Read an exaone."""
    sizes, outside = read_sizes(keys), Table()
    rope = rope_factors(read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT), outside)
    return decoder_spec(keys, sizes, [LayerSpec(llama_block(sizes), rope)] * sizes.n_layers, outside)
