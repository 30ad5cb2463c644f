"""deepseek2: DeepSeek V2 and V3, Moonlight. Latent attention; routed and shared experts."""

from __future__ import annotations

import math
from dataclasses import replace

from slm_core.architectures._decoder import decoder_spec, read_rope
from slm_core.architectures._experts import routed
from slm_core.architectures._keys import Keys
from slm_core.architectures._mtp import mtp_layers, without_mtp_layers
from slm_core.architectures._sizes import Sizes, read_plain_sizes
from slm_core.architectures._spec import Gating, LatentSpec, LayerSpec, ModelSpec, RopeStyle, TensorSpec
from slm_core.architectures._tables import Table, gated, linear, norms

_LOG_MULTIPLIER_UNIT = 0.1  # files store YaRN's multiplier times this


def spec(keys: Keys) -> ModelSpec:
    """Read a deepseek2 with separate up-projections of keys and values (``attn_k_b``, ``attn_v_b``)."""
    n_key, n_rotated = keys.size("attention.key_length_mla"), keys.size("rope.dimension_count")
    latent = LatentSpec(n_key - n_rotated, keys.size("attention.kv_lora_rank"), keys.size("attention.value_length_mla"))
    keys.only("attention.head_count_kv", 1)
    keys.only("attention.key_length", n_rotated + latent.n_rank)
    keys.only("attention.value_length", latent.n_rank)
    whole = read_plain_sizes(keys, n_kv_heads=1, head_dim=n_rotated + latent.n_rank)
    sizes, n_mtp = without_mtp_layers(keys, whole)
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0, zero=True) / _LOG_MULTIPLIER_UNIT
    rope = replace(read_rope(keys, sizes.head_dim, RopeStyle.INTERLEAVED), magnitude=1.0)
    sharpening = 1 + 0.1 * multiplier * math.log(rope.factor) if rope.yarn is not None else 1.0
    attention = _attention(keys, sizes, latent, n_rotated) | norms(sizes.n_embd, "attn_norm", "ffn_norm")
    n_dense = keys.count("leading_dense_block_count", 0)
    dense = LayerSpec(attention | gated(sizes), rope, latent=latent)
    layers = [dense] * min(n_dense, whole.n_layers)
    if n_dense < whole.n_layers:
        gating = Gating.SIGMOID if keys.count("expert_gating_func", 1) == 2 else Gating.SOFTMAX
        plain = LayerSpec(attention, rope, latent=latent)
        layers += [routed(keys, sizes, plain, gating)] * (whole.n_layers - n_dense)
    extra = mtp_layers(keys, sizes, layers[-1], n_mtp)
    scale = sharpening**2 * n_key**-0.5
    return decoder_spec(keys, sizes, layers[: sizes.n_layers], mtp_layers=extra, attention_scale=scale)


def _attention(keys: Keys, sizes: Sizes, latent: LatentSpec, n_rotated: int) -> Table:
    n_q = sizes.n_heads * (latent.n_nope + n_rotated)
    table = linear("attn_kv_a_mqa", (latent.n_rank + n_rotated, sizes.n_embd)) | norms(latent.n_rank, "attn_kv_a_norm")
    table |= linear("attn_output", (sizes.n_embd, sizes.n_heads * latent.n_value))
    table["attn_k_b.weight"] = TensorSpec((sizes.n_heads, latent.n_rank, latent.n_nope))
    table["attn_v_b.weight"] = TensorSpec((sizes.n_heads, latent.n_value, latent.n_rank))
    n_rank_q = keys.count("attention.q_lora_rank", 0)
    if not n_rank_q:
        return table | linear("attn_q", (n_q, sizes.n_embd))
    table |= linear("attn_q_a", (n_rank_q, sizes.n_embd)) | norms(n_rank_q, "attn_q_a_norm")
    return table | linear("attn_q_b", (n_q, n_rank_q))
