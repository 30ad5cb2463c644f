"""lfm2: Liquid's LFM2. Gated short convolutions, and attention with normalized queries and keys in a few blocks."""

from __future__ import annotations

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._keys import Keys
from slm_core.architectures._recurrent import ShortConvSpec
from slm_core.architectures._sizes import Sizes, read_hybrid_sizes
from slm_core.architectures._spec import LayerSpec, ModelSpec, RopeStyle
from slm_core.architectures._tables import Table, attention, gated, linear, norms


def spec(keys: Keys) -> ModelSpec:
    """Read an lfm2; blocks without key heads are convolutions. Its last norm is named like other models' first norm."""
    sizes, attends = read_hybrid_sizes(keys)
    conv = ShortConvSpec(sizes.n_embd, n_taps=keys.size("shortconv.l_cache"))
    block = norms(sizes.n_embd, "attn_norm", "ffn_norm") | gated(sizes)
    attention_block = block | attention(sizes) | norms(sizes.head_dim, "attn_q_norm", "attn_k_norm")
    rope = read_rope(keys, sizes.head_dim, RopeStyle.HALF_SPLIT)
    layers = [
        LayerSpec(attention_block, rope)
        if has_keys
        else LayerSpec(block | _convolution(sizes, conv), None, attends=False, recurrent=conv)
        for has_keys in attends
    ]
    return decoder_spec(keys, sizes, layers, output_norm="token_embd_norm")


def _convolution(sizes: Sizes, conv: ShortConvSpec) -> Table:
    return {
        **linear("shortconv.in_proj", (3 * sizes.n_embd, sizes.n_embd)),
        **linear("shortconv.out_proj", (sizes.n_embd, sizes.n_embd)),
        **norms((sizes.n_embd, conv.n_taps), "shortconv.conv"),
    }
