"""mpt: MPT. ALiBi, layer norms without biases, no gate; in some, clipped queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import LAYER, decoder, make_sizes
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.gguf import PlainValue

_BLOCK = weights(
    {
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    }
)
_OUTSIDE = weights({"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"})


def recipe(config: Config) -> Recipe:
    """Read an mpt; all published models have ALiBi and no biases."""
    n_embd, n_heads = config.size("d_model", 2048), config.size("n_heads", 16)
    sizes = make_sizes(
        n_layers=config.size("n_layers", 24, MAX_PARTS),
        n_ctx=config.size("max_seq_len", 2048),
        n_embd=n_embd,
        n_ff=config.size("expansion_ratio", 4) * n_embd,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=n_embd // n_heads or 1,
        further={LAYER: config.number("layer_norm_epsilon", 1e-5)},
    )
    config.only("no_bias", True)
    config.only("logit_scale")
    config.only("norm_type", "low_precision_layernorm", "layernorm")
    config.neutral("emb_pdrop", "embedding_fraction", "init_config", "init_device", "learned_pos_emb")
    config.neutral("tokenizer_name", "verbose")
    base = decoder(config, "mpt", sizes, _BLOCK, None, tied=True, model=_OUTSIDE, metadata=_attention(config))
    return replace(base, prefix="transformer.blocks.{i}.")


def _attention(config: Config) -> dict[str, PlainValue]:
    about = config.part("attn_config")
    about.only("attn_type", "multihead_attention")
    about.only("softmax_scale")
    about.only("alibi", True)
    for name in ("prefix_lm", "qk_ln", "is_encoder_decoder"):
        about.only(name, False)
    about.neutral("attn_impl", "attn_pdrop", "attn_uses_sequence_id")  # the last one is for rows with several texts
    return {
        "attention.max_alibi_bias": about.number("alibi_bias_max", 8.0),
        "attention.clamp_kqv": about.number("clip_qkv", 0.0),
    }
