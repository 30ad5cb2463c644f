"""Which tensors of a GGUF file are matrices that engines accept in any type; as in llama.cpp (``llama-quant.cpp``)."""

from __future__ import annotations

_EXCLUDED = ("position_embd.weight", "token_types.weight")

# Norms, routers, small and sensitive matrices, and tensors that engines read only as floats.
_EXCLUDED_PARTS = (
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_first.weight",
    *(f"time_mix_{letter}{i}.weight" for letter in "wva" for i in range(3)),
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight",
    "attn_rel_b.weight",
    ".position_embd",
    "sam.pos_embd",
    "sam.neck.",
    "sam.net_",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
)


def may_be_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is one or more matrices that engines accept in any type."""
    is_matrix = len(shape) > 1 and max(shape[:-1]) > 1
    is_excluded = name in _EXCLUDED or any(part in name for part in _EXCLUDED_PARTS)
    return is_matrix and name.endswith("weight") and not is_excluded
