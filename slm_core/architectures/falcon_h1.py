"""falcon-h1: in each block attention and a state side by side; its many multipliers are in the weights of files."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle, TensorSpec
from slm_core.architectures._states import read_mamba2
from slm_core.architectures._tables import attention, biases, gated, linear, mamba2, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a falcon-h1; the name of its second norm has no ending, and the norm in its state's layer may be missing."""
    sizes, recurrent = read_sizes(keys), read_mamba2(keys)
    dense = gated(sizes) | linear("attn_output", (sizes.n_embd, sizes.n_q))
    block = norms(sizes.n_embd, "attn_norm") | attention(sizes) | mamba2(sizes, recurrent) | gated(sizes)
    block |= biases(dense, required=False) | {"ffn_norm": TensorSpec((sizes.n_embd,))}
    for name in ("ssm_norm.weight", "ssm_conv1d.bias"):
        block[name] = TensorSpec(block[name].shape, required=False)
    layer = LayerSpec(block, read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT), recurrent=recurrent)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers)
