"""nomic_bert: Nomic Embed, an encoder. A bert with RoPE and gates; only norms have biases."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.config import MAX_PARTS, Config
from slm_core.checkpoints.decoder import LAYER, SILU, Sizes, decoder, make_sizes, read_sizes, with_biases
from slm_core.checkpoints.recipe import Part, Recipe, weights
from slm_core.checkpoints.rope import Positions, read_rope

_MATRICES = weights(
    {
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_up": "mlp.fc11",
        "ffn_gate": "mlp.fc12",
        "ffn_down": "mlp.fc2",
    }
)
_NORMS = weights({"attn_output_norm": "norm1", "layer_output_norm": "norm2"})
_OUTSIDE = {
    **weights({"token_embd": "embeddings.word_embeddings"}),
    **with_biases(weights({"token_embd_norm": "emb_ln"})),
    "token_types.weight": Part("embeddings.token_type_embeddings.weight"),
}
_FREQ_BASE = 1000.0
_OF_ITS_OWN_CODE = """
attention_probs_dropout_prob dense_seq_output fused_bias_fc fused_dropout_add_ln layer_norm_epsilon n_positions
pad_vocab_size_multiple reorder_and_upcast_attn rotary_scaling_factor summary_activation summary_first_dropout
summary_proj_to_labels summary_type summary_use_proj tie_word_embeddings use_flash_attn use_xentropy
"""
"""Keys without effect up to the training length; beyond it RoPE would have to be scaled."""


def recipe(config: Config) -> Recipe:
    """Read a nomic_bert, in the format of transformers or of the original code."""
    config.neutral(*_OF_ITS_OWN_CODE.split())
    sizes, positions = _of_its_own_code(config) if "n_embd" in config else _of_transformers(config)
    block = {**_MATRICES, **with_biases(_NORMS)}
    base = decoder(config, "nomic-bert", sizes, block, positions, tied=True, metadata={"attention.causal": False})
    return replace(
        base,
        model=_OUTSIDE,
        prefix="encoder.layers.{i}.",
        plain={"tokenizer.ggml.token_type_count": config.size("type_vocab_size", 2)},
        unused=r"^(pooler|cls)\.|position_ids$",
        renamed={r"^(nomic_)?bert\.": ""},
    )


def _of_transformers(config: Config) -> tuple[Sizes, Positions]:
    sizes = read_sizes(
        config,
        norm=LAYER,
        eps_key="layer_norm_eps",
        eps=1e-12,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=2048,
    )
    config.only("hidden_act", *SILU)
    return sizes, read_rope(config, sizes.head_dim, sizes.n_ctx, _FREQ_BASE)


def _of_its_own_code(config: Config) -> tuple[Sizes, Positions]:
    n_embd, n_heads = config.size("n_embd"), config.size("n_head")
    sizes = make_sizes(
        n_layers=config.size("n_layer", largest=MAX_PARTS),
        n_ctx=config.size("max_trained_positions", 2048),
        n_embd=n_embd,
        n_ff=config.size("n_inner"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=n_embd // n_heads or 1,
        further={LAYER: config.number("layer_norm_epsilon", 1e-12)},
    )
    config.only("activation_function", "swiglu")
    for name in ("causal", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "qkv_proj_bias", "use_rms_norm"):
        config.flag(name)  # required, because its class has another default
        config.only(name, False)
    for name in ("parallel_block", "parallel_block_tied_norm", "scale_attn_by_inverse_layer_idx"):
        config.only(name, False)
    config.only("scale_attn_weights", True)
    config.only("rotary_emb_fraction", 1.0)
    config.only("rotary_emb_interleaved", False)
    config.only("rotary_emb_scale_base")
    keys = {"rope.dimension_count": sizes.head_dim, "rope.freq_base": config.number("rotary_emb_base", _FREQ_BASE)}
    return sizes, Positions(dict(keys), {})
