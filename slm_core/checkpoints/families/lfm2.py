"""lfm2: Liquid's LFM2. Gated short convolutions, and attention with normalized queries and keys in a few blocks."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.changes import Squeezed
from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import RMS, decoder, make_sizes
from slm_core.checkpoints.recipe import Part, Recipe, weights
from slm_core.checkpoints.rope import read_rope
from slm_core.errors import UnsupportedModel
from slm_core.gguf import PlainValue

_BLOCK = weights(
    {
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    }
)
_ATTENTION = weights(
    {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
    }
)
_CONVOLUTION = {
    **weights({"shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj"}),
    "shortconv.conv.weight": Part("conv.conv.weight", Squeezed()),
}


def recipe(config: Config) -> Recipe:
    """Read an lfm2; its last norm has the name that other models use for the first norm."""
    n_embd, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    n_layers = config.size("num_hidden_layers", largest=MAX_PARTS)
    n_kv_heads = config.size("num_key_value_heads", 8)
    sizes = make_sizes(
        n_layers=n_layers,
        n_ctx=config.size("max_position_embeddings", 128_000),
        n_embd=n_embd,
        n_ff=_n_ff(config),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=n_embd // n_heads or 1,
        further={RMS: config.number("norm_eps", config.number("block_norm_eps", 1e-5))},
    )
    config.only("conv_bias", False)
    for name, value in (("conv_dim", n_embd), ("conv_dim_out", n_embd), ("block_dim", n_embd), ("num_heads", n_heads)):
        config.only(name, value)
    config.neutral("block_mlp_init_scale", "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init")
    config.neutral("conv_use_xavier_init", "theta", "use_pos_enc")
    config.only("head_dim", sizes.head_dim)
    attends = _attending(config, n_layers)
    metadata: dict[str, PlainValue] = {
        "attention.head_count_kv": [n_kv_heads * attending for attending in attends],
        "shortconv.l_cache": config.size("conv_L_cache", 3),
    }
    blocks = [_BLOCK | (_ATTENTION if attending else _CONVOLUTION) for attending in attends]
    positions, tied = read_rope(config, sizes.head_dim, sizes.n_ctx, 1e6), config.flag("tie_embedding", True)
    base = decoder(config, "lfm2", sizes, blocks, positions, tied=tied, metadata=metadata)
    model = {name: part for name, part in base.model.items() if name != "output_norm.weight"}
    return replace(base, model=model | {"token_embd_norm.weight": Part("model.embedding_norm.weight")})


def _attending(config: Config, n_layers: int) -> list[bool]:
    indices = config.integers("full_attn_idxs")
    kinds = config.items("layer_types", str, n_layers)
    if kinds is None:
        return [i in indices for i in range(n_layers)]
    if unknown := set(kinds) - {"conv", "full_attention"}:
        which = min(unknown)[:80]
        raise UnsupportedModel(f"{config.source}: 'layer_types' has {which!r} (accepted: conv, full_attention)")
    return [kind == "full_attention" for kind in kinds]


def _n_ff(config: Config) -> int:
    """The width of feed-forward layers; it may be derived from another width, as in Llama 1."""
    n_ff = config.size("block_ff_dim", config.size("intermediate_size", 12_288))
    config.neutral("intermediate_size")
    multiple, factor = config.size("block_multiple_of", 256), config.number("block_ffn_dim_multiplier", 1.0)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return n_ff
    scaled = int(factor * int(2 * n_ff / 3))
    return multiple * -(-scaled // multiple)
