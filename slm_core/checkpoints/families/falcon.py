"""falcon: Falcon 7B, 40B and 180B. Parallel attention and feed-forward, layer norms, no gate; two norms from 40B on."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.changes import Grouped
from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import LAYER, Sizes, decoder, make_sizes, with_biases
from slm_core.checkpoints.recipe import Recipe, changed, weights
from slm_core.checkpoints.rope import read_rope
from slm_core.errors import UnsupportedModel

_MATRICES = weights(
    {
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    }
)
_ONE_NORM = with_biases(weights({"attn_norm": "input_layernorm"}))
_TWO_NORMS = with_biases(weights({"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}))
_NAMES = weights({"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f"})


def recipe(config: Config) -> Recipe:
    """Read a falcon; keys and values are stored after the queries of their group."""
    grouped = config.flag("new_decoder_architecture", False)
    sizes = _sizes(config, grouped)
    config.only("activation", "gelu")
    config.only("alibi", False)
    config.only("bias", False)
    config.only("apply_residual_connection_post_layernorm", False)
    config.only("parallel_attn", True)
    n_norms = config.size("num_ln_in_parallel_attn", 2 if grouped else 1)
    norms = _TWO_NORMS if grouped and n_norms == 2 else _ONE_NORM
    shared = sizes.n_heads // sizes.n_kv_heads
    block = {**changed(_MATRICES, Grouped(shared, sizes.n_kv_heads), "attn_qkv"), **norms}
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    outside = with_biases(_NAMES, "output_norm")
    base = decoder(config, "falcon", sizes, block, positions, tied=True, model=outside)
    return replace(base, prefix="transformer.h.{i}.")


def _sizes(config: Config, grouped: bool) -> Sizes:
    n_embd, n_heads = config.size("hidden_size", 4544), config.size("num_attention_heads", 71)
    n_kv_heads = config.size("num_kv_heads", n_heads)
    if grouped:
        config.neutral("multi_query")
    elif config.flag("multi_query", True):
        n_kv_heads = 1
    else:
        raise UnsupportedModel(f"{config.source}: 'multi_query' is false, which is not implemented (accepted: true)")
    return make_sizes(
        n_layers=config.size("num_hidden_layers", 32, MAX_PARTS),
        n_ctx=config.size("max_position_embeddings", 2048),
        n_embd=n_embd,
        n_ff=config.size("ffn_hidden_size", 4 * n_embd),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=n_embd // n_heads or 1,
        further={LAYER: config.number("layer_norm_epsilon", 1e-5)},
    )
