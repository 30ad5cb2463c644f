"""refact: Refact 1.6B. A llama with ALiBi and one key head for all queries."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec
from slm_core.architectures._tables import llama_block

_MAX_BIAS = 8.0  # from the paper; files have no key for it


def spec(keys: Keys) -> ModelSpec:
    """Read a refact."""
    sizes = read_sizes(keys)
    layer = LayerSpec(llama_block(sizes), None)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers, alibi_max_bias=_MAX_BIAS)
