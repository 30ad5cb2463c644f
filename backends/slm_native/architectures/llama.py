"""llama: Llama 1 to 3, Mistral, SmolLM and others. Rows of Q and K are permuted for interleaved RoPE pairs."""

from __future__ import annotations

from slm_native.architectures._decoder import decoder_spec, read_rope, read_sizes
from slm_native.kernels import RopeStyle
from slm_native.keys import Keys
from slm_native.spec import ModelSpec


def spec(keys: Keys) -> ModelSpec:
    """Read a llama; files older than the key ``rope.freq_base`` mean 10,000, as the GGUF specification has it."""
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_dim, RopeStyle.INTERLEAVED, default_freq_base=10_000.0)
    keys.only("tensor_data_layout", "Meta AI original pth")  # the layout that this file describes
    return decoder_spec(keys, sizes, rope, optional_biases=sizes.linears(), rope_factors=True)
