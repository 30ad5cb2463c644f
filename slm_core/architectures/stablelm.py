"""stablelm: layer norms, partial RoPE; Stable LM 2 12B has parallel layers and per-head norms."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, NormKind, RopeStyle
from slm_core.architectures._tables import attention, biases, gated, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a stablelm; without a norm of the feed-forward layer, attention and feed-forward are parallel."""
    sizes = read_sizes(keys)
    parallel = "blk.0.ffn_norm.weight" not in keys.gguf.tensors
    keys.neutral("use_parallel_residual")  # the norms decide
    before = norms(sizes.n_embd, "attn_norm") if parallel else norms(sizes.n_embd, "attn_norm", "ffn_norm")
    block = attention(sizes) | gated(sizes) | before | biases(before)
    block |= biases(block, "attn_q", "attn_k", "attn_v", required=False)
    block |= norms((sizes.n_heads, sizes.head_dim), "attn_q_norm", required=False)
    block |= norms((sizes.n_kv_heads, sizes.head_dim), "attn_k_norm", required=False)
    layer = LayerSpec(block, read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT))
    after = biases(norms(sizes.n_embd, "output_norm"))
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers, after, norm=NormKind.LAYER, parallel=parallel)
