"""gpt_neox: Pythia and others. Layer norms, biases everywhere, partial RoPE, parallel attention and feed-forward."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.changes import Grouped
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import LAYER, decoder, read_sizes, with_biases
from slm_core.checkpoints.recipe import Recipe, biases, changed, weights
from slm_core.checkpoints.rope import read_rope

_MATRICES = weights(
    {
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    }
)
_NORMS = weights({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"})


def recipe(config: Config) -> Recipe:
    """Read a gpt_neox; each head's query, key and value are stored side by side."""
    sizes = read_sizes(config, norm=LAYER, eps_key="layer_norm_eps", eps=1e-5)
    config.only("hidden_act", "gelu")
    config.only("attention_bias", True)
    parallel = config.flag("use_parallel_residual", True)
    partial, freq_base = config.number("rotary_pct", 0.25), config.number("rotary_emb_base", 10_000.0)
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, freq_base, partial=partial)
    matrices = changed(_MATRICES, Grouped(1, sizes.n_heads), "attn_qkv")
    block = {**matrices, **biases(matrices), **with_biases(_NORMS)}
    names = {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm"}
    outside = with_biases(weights(names), "output_norm")
    if not config.flag("tie_word_embeddings", False):
        outside |= weights({"output": "embed_out"})
    metadata = {"use_parallel_residual": parallel}
    base = decoder(config, "gptneox", sizes, block, positions, tied=False, model=outside, metadata=metadata)
    unused = rf"{base.unused}|\.attention\.(masked_)?bias$"
    return replace(base, prefix="gpt_neox.layers.{i}.", unused=unused)
