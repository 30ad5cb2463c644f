"""falcon-h1: parallel attention and Mamba 2 in each block; files have its multipliers folded into weights."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle, TensorSpec
from slm_core.architectures._states import read_mamba2
from slm_core.architectures._tables import attention, biases, gated, linear, mamba2, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a falcon-h1; the name of its second norm has no suffix, and the norm of its Mamba 2 layer is optional."""
    sizes, recurrent = read_sizes(keys), read_mamba2(keys)
    dense = gated(sizes) | linear("attn_output", (sizes.n_embd, sizes.n_q))
    block = norms(sizes.n_embd, "attn_norm") | attention(sizes) | mamba2(sizes, recurrent) | gated(sizes)
    block |= biases(dense, required=False) | {"ffn_norm": TensorSpec((sizes.n_embd,))}
    for name in ("ssm_norm.weight", "ssm_conv1d.bias"):
        block[name] = TensorSpec(block[name].shape, required=False)
    layer = LayerSpec(block, read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT), recurrent=recurrent)
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers)
