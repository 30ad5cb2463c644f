"""cohere2: Command R7B and A. A cohere with sliding windows in three layers of four; the others have no positions."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import LAYER, SILU, decoder, read_sizes
from slm_core.checkpoints.families.cohere import BLOCK
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.rope import read_rope, sliding_layers
from slm_core.gguf import PlainValue


def recipe(config: Config) -> Recipe:
    """Read a cohere2."""
    sizes = read_sizes(config, norm=LAYER, eps_key="layer_norm_eps", eps=1e-5)
    config.only("hidden_act", *SILU)
    config.only("attention_bias", False)
    for name in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"):
        config.only(name, True)
    config.only("order_of_interleaved_layers", "local_attn_first")
    config.only("position_embedding_type", "rope_gptj")
    config.only("rotary_pct", 1.0)
    config.neutral("layer_switch", "use_parallel_embedding")  # another name of the period; how training was divided
    period = config.size("sliding_window_pattern", config.size("_sliding_window_pattern", 4))
    metadata: dict[str, PlainValue] = {
        "logit_scale": config.number("logit_scale", 0.0625),
        "attention.sliding_window": config.size("sliding_window", 4096),
        "attention.sliding_window_pattern": sliding_layers(config, sizes.n_layers, lambda i: (i + 1) % period > 0),
    }
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    return decoder(config, "cohere2", sizes, BLOCK, positions, tied=True, metadata=metadata)
