"""deepseek_v2: DeepSeek V2 Lite and others. Latent attention; routed and shared experts."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.changes import UpProjection
from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import GATED, NORMS, RMS, SILU, Sizes, decoder, experts, make_sizes
from slm_core.checkpoints.recipe import Part, Parts, Recipe, mtp, weights
from slm_core.checkpoints.rope import Positions, read_rope, stated_rope
from slm_core.errors import UnsupportedModel
from slm_core.gguf import PlainValue

SHARED_EXPERT = weights({f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")})


def recipe(config: Config) -> Recipe:
    """Read a deepseek_v2."""
    config.only("topk_method", "greedy")
    config.only("scoring_func", "softmax")
    config.only("norm_topk_prob", False)
    for name in ("n_group", "topk_group"):
        config.only(name, 1)
    metadata: dict[str, PlainValue] = {
        "leading_dense_block_count": config.count("first_k_dense_replace", 0),
        "expert_count": config.size("n_routed_experts", 64, MAX_PARTS),
        "expert_used_count": config.size("num_experts_per_tok"),
        "expert_feed_forward_length": config.size("moe_intermediate_size", 1407),
        "expert_shared_count": config.size("n_shared_experts", 2),
        "expert_weights_scale": config.number("routed_scaling_factor", 1.0),
    }
    return latent_recipe(config, metadata, {}, config.size("num_key_value_heads", config.size("num_attention_heads")))


def latent_recipe(
    config: Config, metadata: dict[str, PlainValue], router: Parts, n_kv_heads: int, n_mtp: int = 0
) -> Recipe:
    """A model with latent attention.

    Args:
        config: the configuration.
        metadata: keys of its experts.
        router: additional tensors of its router.
        n_kv_heads: key heads in the configuration.
        n_mtp: blocks for multi-token prediction after the last block.
    """
    config.only("hidden_act", *SILU)
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    config.only("moe_layer_freq", 1)
    config.only("rope_interleave", True)
    config.neutral("aux_loss_alpha", "ep_size", "head_dim", "qk_head_dim", "seq_aux")
    n_nope, n_rotated = config.size("qk_nope_head_dim", 128), config.size("qk_rope_head_dim", 64)
    n_rank, n_value = config.size("kv_lora_rank", 512), config.size("v_head_dim", 128)
    sizes = _sizes(config, n_rotated + n_rank, n_kv_heads)
    n_rank_q = 0 if config.is_null("q_lora_rank") else config.size("q_lora_rank", 1536)
    keys: dict[str, PlainValue] = {
        "attention.key_length_mla": n_nope + n_rotated,
        "attention.value_length_mla": n_value,
        "attention.value_length": n_rank,
        "attention.kv_lora_rank": n_rank,
        **({"attention.q_lora_rank": n_rank_q} if n_rank_q else {}),
    }
    attention = _attention(UpProjection(sizes.n_heads, n_nope, n_value, True), n_rank_q > 0)
    routed = weights({"ffn_gate_inp": "mlp.gate"}) | SHARED_EXPERT | dict(router)
    n_experts = int(str(metadata["expert_count"]))
    routed |= experts("mlp.experts.{x}", "gate_proj", "up_proj", "down_proj", n_experts)
    n_blocks = sizes.n_layers + n_mtp
    n_dense = min(int(str(metadata["leading_dense_block_count"])), n_blocks)
    blocks = [attention | GATED] * n_dense + [attention | routed] * (n_blocks - n_dense)
    whole, positions = {**keys, **metadata}, _positions(config, n_rotated, sizes.n_ctx)
    recipe = decoder(config, "deepseek2", sizes, blocks[: sizes.n_layers], positions, tied=False, metadata=whole)
    return replace(recipe, mtp_blocks=[mtp(block) for block in blocks[sizes.n_layers :]])


def _sizes(config: Config, head_dim: int, n_kv_heads: int) -> Sizes:
    n_heads = config.size("num_attention_heads")
    if n_kv_heads != n_heads:
        raise UnsupportedModel(
            f"{config.source}: 'num_key_value_heads' is {n_kv_heads} (accepted: {n_heads}, the number of heads)"
        )
    return make_sizes(
        n_layers=config.size("num_hidden_layers", largest=MAX_PARTS),
        n_ctx=config.size("max_position_embeddings"),
        n_embd=config.size("hidden_size"),
        n_ff=config.size("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=1,
        head_dim=head_dim,
        further={RMS: config.number("rms_norm_eps", 1e-6)},
    )


def _attention(up: UpProjection, compressed: bool) -> dict[str, Part]:
    """Queries may be compressed, too; the matrix for keys and values is split."""
    names = {"attn_q_a": "q_a_proj", "attn_q_a_norm": "q_a_layernorm", "attn_q_b": "q_b_proj"}
    names = names if compressed else {"attn_q": "q_proj"}
    names |= {"attn_kv_a_mqa": "kv_a_proj_with_mqa", "attn_kv_a_norm": "kv_a_layernorm", "attn_output": "o_proj"}
    values = UpProjection(up.n_heads, up.n_nope, up.n_value, False)
    return {
        **NORMS,
        **weights({name: f"self_attn.{theirs}" for name, theirs in names.items()}),
        "attn_k_b.weight": Part("self_attn.kv_b_proj.weight", up),
        "attn_v_b.weight": Part("self_attn.kv_b_proj.weight", values),
    }


def _positions(config: Config, n_rotated: int, n_ctx: int) -> Positions:
    """GGUF stores a tenth of the multiplier of scores; a different multiplier of keys is not implemented."""
    metadata, tables = read_rope(config, n_rotated, n_ctx)
    rope = stated_rope(config, 10_000.0)
    if rope.kind == "yarn":
        of_all = rope.where.number("mscale_all_dim", 0.0)
        if rope.where.number("mscale", 0.0) != of_all or "attention_factor" in rope.where:
            raise UnsupportedModel(f"{config.source}: 'mscale' differs from 'mscale_all_dim', which is not implemented")
        metadata.pop("rope.scaling.attn_factor", None)
        metadata["rope.scaling.yarn_log_multiplier"] = 0.1 * of_all
    return Positions(metadata, tables)
