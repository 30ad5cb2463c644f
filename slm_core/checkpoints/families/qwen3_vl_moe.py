"""qwen3_vl_moe: Qwen3-VL with experts. Only the text model is read: a qwen3_moe with the M-RoPE of a qwen3_vl."""

from __future__ import annotations

from slm_core.checkpoints.changes import Both, RowsOf, Slice
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import read_sizes
from slm_core.checkpoints.families.qwen2_moe import check_experts
from slm_core.checkpoints.families.qwen3_vl import text_model
from slm_core.checkpoints.recipe import Part, Recipe, weights


def recipe(config: Config) -> Recipe:
    """Read the text model of a qwen3_vl_moe.

    Its experts are two tensors of each block: (in, out) as published, (out, in) as transformers 5 saves them.
    """
    text = config.part("text_config")
    sizes = read_sizes(text, num_key_value_heads=16)
    text.only("norm_topk_prob", True)  # its class has no key for it
    n_ff = text.size("moe_intermediate_size", 1408)
    metadata = {
        "expert_count": check_experts(text, 60),
        "expert_used_count": text.size("num_experts_per_tok", 4),
        "expert_feed_forward_length": n_ff,
    }
    block = weights({"ffn_gate_inp": "mlp.gate"})
    for index, name in enumerate(("ffn_gate_exps", "ffn_up_exps")):
        block[f"{name}.weight"] = Part("mlp.experts.gate_up_proj", Both(RowsOf(sizes.n_embd), Slice(1, 2, index)))
    block["ffn_down_exps.weight"] = Part("mlp.experts.down_proj", RowsOf(n_ff))
    return text_model(config, "qwen3vlmoe", sizes, block, metadata)
