"""exaone: EXAONE 3 and 3.5. A llama with other tensor names and half-split RoPE."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import RMS, SILU, decoder, make_sizes
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope

_BLOCK = weights(
    {
        "attn_norm": "ln_1",
        "attn_q": "attn.attention.q_proj",
        "attn_k": "attn.attention.k_proj",
        "attn_v": "attn.attention.v_proj",
        "attn_output": "attn.attention.out_proj",
        "ffn_norm": "ln_2",
        "ffn_gate": "mlp.c_fc_0",
        "ffn_up": "mlp.c_fc_1",
        "ffn_down": "mlp.c_proj",
    }
)
_OUTSIDE = weights({"token_embd": "transformer.wte", "output_norm": "transformer.ln_f"})


def recipe(config: Config) -> Recipe:
    """Read an exaone."""
    n_embd, n_heads = config.size("hidden_size"), config.size("num_attention_heads")
    sizes = make_sizes(
        n_layers=config.size("num_layers", largest=MAX_PARTS),
        n_ctx=config.size("max_position_embeddings"),
        n_embd=n_embd,
        n_ff=config.size("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=config.size("num_key_value_heads", n_heads),
        head_dim=config.size("head_dim", n_embd // n_heads or 1),
        further={RMS: config.number("layer_norm_epsilon", 1e-5)},
    )
    config.only("activation_function", *SILU)
    config.neutral("embed_dropout", "num_hidden_layers")  # the same as num_layers
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    base = decoder(config, "exaone", sizes, _BLOCK, positions, tied=False, model=_OUTSIDE)
    return replace(base, prefix="transformer.h.{i}.", unused=rf"{base.unused}|\.rotary\.inv_freq$")
