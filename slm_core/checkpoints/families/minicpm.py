"""minicpm: MiniCPM 1 and 2. A llama with multipliers on embeddings, residuals and logits."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, NORMS, SILU, decoder, interleaved, read_sizes
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.rope import read_rope
from slm_core.gguf import PlainValue


def recipe(config: Config) -> Recipe:
    """Read a minicpm."""
    sizes = read_sizes(config)
    config.only("hidden_act", *SILU)
    config.only("attention_bias", False)
    metadata: dict[str, PlainValue] = {
        "embedding_scale": config.number("scale_emb", 1.0),
        "residual_scale": config.number("scale_depth", 1.0) * sizes.n_layers**-0.5,
        "logit_scale": sizes.n_embd / config.number("dim_model_base", 1.0),
    }
    block = interleaved(ATTENTION, sizes) | GATED | NORMS
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    return decoder(config, "minicpm", sizes, block, positions, tied=True, metadata=metadata)
