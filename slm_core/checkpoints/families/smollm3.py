"""smollm3: SmolLM3. A llama in which every fourth layer has no position embedding."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, NORMS, SILU, decoder, interleaved, read_sizes, with_biases
from slm_core.checkpoints.families.qwen2 import refuse_windows
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.rope import read_rope

_INTERVAL = 4


def recipe(config: Config) -> Recipe:
    """Read a smollm3."""
    sizes = read_sizes(config, num_key_value_heads=4)
    config.only("hidden_act", *SILU)
    config.only("no_rope_layer_interval", _INTERVAL)
    config.only("no_rope_layers", [int((i + 1) % _INTERVAL > 0) for i in range(sizes.n_layers)])
    refuse_windows(config, sizes)
    attention = with_biases(interleaved(ATTENTION, sizes), wanted=config.flag("attention_bias", False))
    config.only("mlp_bias", False)
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, 2e6)
    return decoder(config, "smollm3", sizes, attention | GATED | NORMS, positions, tied=True)
