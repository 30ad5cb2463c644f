"""bert: BERT and related encoders (MiniLM, BGE, E5, GTE). Learned positions, post-norms, no gate.

robertas are the same with positions that begin later, and another head for ranking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slm_core.checkpoints.changes import WithoutFirst
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import LAYER, decoder, read_sizes, with_biases
from slm_core.checkpoints.recipe import Part, Recipe, weights
from slm_core.errors import InvalidModelFile
from slm_core.gguf import RANK_EOS_TWICE, PlainValue

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
    **weights({"token_embd": "embeddings.word_embeddings"}),
    **with_biases(weights({"token_embd_norm": "embeddings.LayerNorm"})),
    "token_types.weight": Part("embeddings.token_type_embeddings.weight"),
}


def recipe(config: Config) -> Recipe:
    """Read a bert; engines give every token the first type."""
    return encoder(config, {"cls": "pooler.dense", "cls.output": "classifier"}, n_types=2)


def roberta(config: Config) -> Recipe:
    """Read a roberta: positions begin after the padding token's."""
    first = config.count("pad_token_id", 1) + 1
    head = {"cls": "classifier.dense", "cls.output": "classifier.out_proj"}
    return encoder(config, head, n_types=1, first=first, rank_metadata={RANK_EOS_TWICE: True})


def encoder(
    config: Config,
    head: Mapping[str, str],
    *,
    n_types: int,
    first: int = 0,
    rank_metadata: Mapping[str, PlainValue] | None = None,
) -> Recipe:
    """Compose a recipe.

    Args:
        config: read for everything else.
        head: names of the layers of the head that ranks.
        n_types: the default of the number of token types.
        first: the row of the position embeddings that belongs to the first token.
        rank_metadata: see ``Recipe``.
    """
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
    n_ctx = sizes.n_ctx - first
    if n_ctx < 1:
        raise InvalidModelFile(f"{config.source}: 'pad_token_id' is {first - 1}, beyond the {sizes.n_ctx} positions")
    config.only("hidden_act", "gelu")
    config.only("position_embedding_type", "absolute")
    config.neutral("attention_probs_dropout_prob", "directionality", "output_past", "tie_word_embeddings")
    config.neutral("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head")
    config.neutral("pooler_type", "gradient_checkpointing")
    # of cross-encoders: an activation after the score, which keeps the order of texts
    config.neutral("sbert_ce_default_activation_function", "sentence_transformers")
    metadata: dict[str, PlainValue] = {"attention.causal": False, "context_length": n_ctx}
    base = decoder(config, "bert", sizes, _BLOCK, None, tied=True, metadata=metadata)
    positions = weights({"position_embd": "embeddings.position_embeddings"}, WithoutFirst(first) if first else None)
    return replace(
        base,
        model=_OUTSIDE | positions,
        prefix="encoder.layer.{i}.",
        plain={"tokenizer.ggml.token_type_count": config.size("type_vocab_size", n_types)},
        unused=r"^(pooler|cls|lm_head|classifier)\.|position_ids$",
        renamed={r"^(bert|roberta)\.": ""},
        rank_head=with_biases(weights(head)),
        rank_metadata=rank_metadata or {},
    )
