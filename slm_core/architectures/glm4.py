"""glm4: GLM 4 of 2025. Pre-norms and post-norms, biases on queries, keys and values, RoPE on half of a head."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._sizes import read_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import attention, biases, linear, norms


def spec(keys: Keys) -> ModelSpec:
    """Read a glm4."""
    sizes = read_sizes(keys)
    block = norms(sizes.n_embd, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm") | attention(sizes)
    block |= biases(block, "attn_q", "attn_k", "attn_v", required=False)
    block |= linear("ffn_up", (2 * sizes.n_ff, sizes.n_embd)) | linear("ffn_down", (sizes.n_embd, sizes.n_ff))
    layer = LayerSpec(block, read_rope(keys, sizes.head_dim, RopeStyle.INTERLEAVED))
    return decoder_spec(keys, sizes, [layer] * sizes.n_layers)
