"""granite: Granite 3, dense. A llama with multipliers."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, NORMS, SILU, decoder, interleaved, read_sizes, with_biases
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.rope import read_rope
from slm_core.gguf import PlainValue


def recipe(config: Config) -> Recipe:
    """Read a granite."""
    sizes = read_sizes(config)
    config.only("hidden_act", *SILU)
    attention = with_biases(interleaved(ATTENTION, sizes), wanted=config.flag("attention_bias", False))
    feed_forward = with_biases(GATED, wanted=config.flag("mlp_bias", False))
    block = attention | feed_forward | NORMS
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    return decoder(config, "granite", sizes, block, positions, tied=False, metadata=multipliers(config))


def multipliers(config: Config) -> dict[str, PlainValue]:
    """The multipliers of embeddings, residuals and scores, and the divisor of logits."""
    return {
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "attention.scale": config.number("attention_multiplier", 1.0),
        "logit_scale": config.number("logits_scaling", 1.0),
    }
