"""bert: BERT and related encoders (MiniLM, BGE, E5, GTE). Learned positions, post-norms, no gate."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import LAYER, decoder, read_sizes, with_biases
from slm_core.checkpoints.recipe import Part, Recipe, weights

_BLOCK = with_biases(
    weights(
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        }
    )
)
_OUTSIDE = {
    **weights({"token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings"}),
    **with_biases(weights({"token_embd_norm": "embeddings.LayerNorm"})),
    "token_types.weight": Part("embeddings.token_type_embeddings.weight"),
}


def recipe(config: Config) -> Recipe:
    """Read a bert; every token is of the first type."""
    sizes = read_sizes(
        config,
        norm=LAYER,
        eps_key="layer_norm_eps",
        eps=1e-12,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=512,
    )
    config.only("hidden_act", "gelu")
    config.only("position_embedding_type", "absolute")
    config.neutral("attention_probs_dropout_prob", "directionality", "output_past", "tie_word_embeddings")
    config.neutral("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head")
    config.neutral("pooler_type", "gradient_checkpointing")
    base = decoder(config, "bert", sizes, _BLOCK, None, tied=True, metadata={"attention.causal": False})
    return replace(
        base,
        model=_OUTSIDE,
        prefix="encoder.layer.{i}.",
        plain={"tokenizer.ggml.token_type_count": config.size("type_vocab_size", 2)},
        unused=r"^(pooler|cls)\.|position_ids$",
        renamed={r"^bert\.": ""},
    )
