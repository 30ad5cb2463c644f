"""dbrx: DBRX. Experts, layer norms without biases, clipped queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.changes import OfExperts
from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import LAYER, decoder, make_sizes
from slm_core.checkpoints.recipe import Part, Recipe, weights
from slm_core.checkpoints.rope import read_rope

_BLOCK = weights(
    {
        "attn_norm": "norm_attn_norm.norm_1",
        "attn_qkv": "norm_attn_norm.attn.Wqkv",
        "attn_output": "norm_attn_norm.attn.out_proj",
        "attn_output_norm": "norm_attn_norm.norm_2",
        "ffn_gate_inp": "ffn.router.layer",
    }
)
_OUTSIDE = weights({"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"})
_EPS = 1e-5  # configurations have no key for it


def recipe(config: Config) -> Recipe:
    """Read a dbrx."""
    attention, experts = config.part("attn_config"), config.part("ffn_config")
    n_embd, n_heads = config.size("d_model", 2048), config.size("n_heads", 16)
    sizes = make_sizes(
        n_layers=config.size("n_layers", 24, MAX_PARTS),
        n_ctx=config.size("max_seq_len", 2048),
        n_embd=n_embd,
        n_ff=experts.size("ffn_hidden_size", 3584),
        n_heads=n_heads,
        n_kv_heads=attention.size("kv_n_heads", 1),
        head_dim=n_embd // n_heads or 1,
        further={LAYER: _EPS},
    )
    n_experts = experts.size("moe_num_experts", 4, MAX_PARTS)
    metadata = {
        "attention.clamp_kqv": attention.number("clip_qkv", 0.0),
        "expert_count": n_experts,
        "expert_used_count": experts.size("moe_top_k", 1),
    }
    experts.only("ffn_act_fn", {"name": "silu"})
    experts.neutral("hidden_size")  # the model's width: shapes are checked
    experts.only("moe_normalize_expert_weights", 1)
    experts.neutral("moe_jitter_eps", "moe_loss_weight", "uniform_expert_assignment")
    for part in (attention, experts):
        part.only("is_encoder_decoder", False)
    config.neutral("emb_pdrop", "num_key_value_heads")
    attention.neutral("attn_pdrop")
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, attention.number("rope_theta", 10_000.0))
    matrices = {
        f"ffn_{name}_exps.weight": Part(f"ffn.experts.mlp.{theirs}", OfExperts(n_experts, transposed=name == "down"))
        for name, theirs in (("gate", "w1"), ("up", "v1"), ("down", "w2"))
    }
    block = _BLOCK | matrices
    base = decoder(config, "dbrx", sizes, block, positions, tied=False, model=_OUTSIDE, metadata=metadata)
    return replace(base, prefix="transformer.blocks.{i}.")
