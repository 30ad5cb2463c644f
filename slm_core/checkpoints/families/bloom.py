"""bloom: BLOOM. ALiBi, a norm after the embedding, layer norms, biases everywhere, no gate."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.changes import Grouped
from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import LAYER, decoder, make_sizes, with_biases
from slm_core.checkpoints.recipe import Recipe, biases, changed, weights

_MATRICES = weights(
    {
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    }
)
_NORMS = weights({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"})
_OUTSIDE = with_biases(
    weights(
        {
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
        }
    ),
    "token_embd_norm",
    "output_norm",
)


def recipe(config: Config) -> Recipe:
    """Read a bloom; the first models were saved without the LM head, and have other keys for sizes."""
    n_embd = config.size("hidden_size", config.size("n_embed", 64))
    n_heads = config.size("n_head", config.size("num_attention_heads", 8))
    sizes = make_sizes(
        n_layers=config.size("n_layer", config.size("num_hidden_layers", 2, MAX_PARTS), MAX_PARTS),
        n_ctx=config.size("seq_length", 2048),
        n_embd=n_embd,
        n_ff=4 * n_embd,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=n_embd // n_heads or 1,
        further={LAYER: config.number("layer_norm_epsilon", 1e-5)},
    )
    config.only("apply_residual_connection_post_layernorm", False)
    config.neutral("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi")
    config.neutral("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact")
    matrices = changed(_MATRICES, Grouped(1, n_heads), "attn_qkv")
    block = {**matrices, **biases(matrices), **with_biases(_NORMS)}
    base = decoder(config, "bloom", sizes, block, None, tied=True, model=_OUTSIDE)
    return replace(
        base,
        prefix="transformer.h.{i}.",
        renamed={r"^(?=(h|word_embeddings|word_embeddings_layernorm|ln_f)\.)": "transformer."},
    )
