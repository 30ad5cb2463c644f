"""llama: Llama 1 to 3, SmolLM, Yi, TinyLlama and others."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, NORMS, SILU, decoder, interleaved, read_sizes, with_biases
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.rope import read_rope


def recipe(config: Config) -> Recipe:
    """Read a llama."""
    sizes = read_sizes(config)
    config.only("hidden_act", *SILU)
    config.only("rope_interleaved", False)  # the order of rows in transformers' class
    config.neutral("max_sequence_length")  # of Llama 1; max_position_embeddings says the same
    attention = with_biases(interleaved(ATTENTION, sizes), wanted=config.flag("attention_bias", False))
    feed_forward = with_biases(GATED, wanted=config.flag("mlp_bias", False))
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    return decoder(config, "llama", sizes, attention | feed_forward | NORMS, positions, tied=False)
