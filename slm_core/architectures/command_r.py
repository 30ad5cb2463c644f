"""command-r: Command R and Aya. Parallel attention and feed-forward after one bias-free layer norm, scaled logits."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, NormKind, RopeStyle
from slm_core.architectures._tables import attention, gated, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a command-r; Command R+ has norms per head, each with its own weights."""
    sizes = read_sizes(keys)
    block = attention(sizes) | gated(sizes) | norms(sizes.n_embd, "attn_norm")
    if "blk.0.attn_q_norm.weight" in keys.gguf.tensors:
        block |= norms((sizes.n_heads, sizes.head_dim), "attn_q_norm")
        block |= norms((sizes.n_kv_heads, sizes.head_dim), "attn_k_norm")
    layer = LayerSpec(block, read_rope(keys, sizes.head_dim, RopeStyle.INTERLEAVED))
    return decoder_spec(
        keys,
        sizes,
        [layer] * sizes.n_layers,
        norm=NormKind.LAYER,
        parallel=True,
        logit_scale=keys.number("logit_scale"),
    )
