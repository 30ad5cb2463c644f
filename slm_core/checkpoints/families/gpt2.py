"""gpt2: GPT-2. Learned positions, layer norms, biases everywhere, no gate; matrices are stored as (in, out)."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.changes import Transposed
from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import GELU_TANH, LAYER, decoder, make_sizes, with_biases
from slm_core.checkpoints.recipe import Recipe, changed, weights

_MATRICES = {
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BLOCK = with_biases(weights({**_MATRICES, "attn_norm": "ln_1", "ffn_norm": "ln_2"}))
_OUTSIDE = with_biases(
    weights({"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"}),
    "output_norm",
)


def recipe(config: Config) -> Recipe:
    """Read a gpt2; the first models were saved without the LM head."""
    n_embd, n_heads = config.size("n_embd", 768), config.size("n_head", 12)
    sizes = make_sizes(
        n_layers=config.size("n_layer", 12, MAX_PARTS),
        n_ctx=config.size("n_positions", 1024),
        n_embd=n_embd,
        n_ff=config.size("n_inner", 4 * n_embd),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=n_embd // n_heads or 1,
        further={LAYER: config.number("layer_norm_epsilon", 1e-5)},
    )
    config.only("activation_function", *GELU_TANH)
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.neutral("n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout")
    config.neutral("summary_proj_to_labels", "summary_type", "summary_use_proj")
    block = changed(_BLOCK, Transposed(), *_MATRICES)
    base = decoder(config, "gpt2", sizes, block, None, tied=True, model=_OUTSIDE)
    return replace(
        base,
        prefix="transformer.h.{i}.",
        unused=rf"{base.unused}|\.attn\.(masked_)?bias$",
        renamed={r"^(?=(h|wte|wpe|ln_f)\.)": "transformer."},
    )
