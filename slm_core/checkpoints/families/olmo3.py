"""olmo3: OLMo 3. An olmo2 with sliding windows in three layers of four; these layers have no RoPE scaling."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import SILU, decoder, read_sizes
from slm_core.checkpoints.families.olmo2 import BLOCK
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.rope import read_rope, sliding_layers, stated_rope
from slm_core.gguf import PlainValue

_FREQ_BASE = 500_000.0


def recipe(config: Config) -> Recipe:
    """Read an olmo3."""
    sizes = read_sizes(config, eps=1e-5)
    config.only("hidden_act", *SILU)
    config.only("attention_bias", False)
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, _FREQ_BASE, layers="full_attention")
    if "rope_parameters" in config:
        local = stated_rope(config, _FREQ_BASE, "sliding_attention")
        local.where.only("rope_type", "default")
        local.where.only("rope_theta", positions.metadata["rope.freq_base"])
    metadata: dict[str, PlainValue] = {
        "attention.sliding_window": config.size("sliding_window", 4096),
        "attention.sliding_window_pattern": sliding_layers(config, sizes.n_layers, lambda i: (i + 1) % 4 > 0),
    }
    return decoder(config, "olmo2", sizes, BLOCK, positions, tied=False, metadata=metadata)
