"""exaone4: EXAONE 4. Post-norms and norms per head; the large one has sliding windows in three layers of four."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, HEAD_NORMS, SILU, decoder, read_sizes
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope, sliding_layers
from slm_core.errors import UnsupportedModel
from slm_core.gguf import PlainValue

_BLOCK = ATTENTION | HEAD_NORMS | GATED
_BLOCK |= weights({"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"})


def recipe(config: Config) -> Recipe:
    """Read an exaone4."""
    sizes = read_sizes(config, eps=1e-5, num_key_value_heads=32)
    config.only("hidden_act", *SILU)
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx)
    metadata: dict[str, PlainValue] = {}
    if config.is_null("sliding_window"):
        config.neutral("sliding_window_pattern")
        config.only("layer_types", ["full_attention"] * sizes.n_layers)
    else:
        config.only("sliding_window_pattern", 4, "LLLG")
        metadata["attention.sliding_window"] = config.size("sliding_window", 4096)
        kinds = sliding_layers(config, sizes.n_layers, lambda i: (i + 1) % 4 > 0)
        metadata["attention.sliding_window_pattern"] = kinds
        if not any(kinds):  # its class then has no positions at all
            raise UnsupportedModel(f"{config.source}: 'sliding_window' without a sliding-window layer (accepted: null)")
    return decoder(config, "exaone4", sizes, _BLOCK, positions, tied=False, metadata=metadata)
