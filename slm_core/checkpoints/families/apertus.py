"""apertus: Apertus. Per-head norms, no gate, and an activation (xIELU) with trained parameters."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, HEAD_NORMS, UNGATED, decoder, read_sizes
from slm_core.checkpoints.recipe import Recipe, weights
from slm_core.checkpoints.rope import read_rope
from slm_core.errors import UnsupportedModel

_NORMS = weights({"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"})
_NUMBERS = {f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")}


def recipe(config: Config) -> Recipe:
    """Read an apertus."""
    sizes = read_sizes(config, eps=1e-5)
    config.only("hidden_act", "xielu")
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    config.only("post_norm", False)
    config.only("qk_norm", True)
    if "rope_parameters" not in config and "rope_scaling" not in config:  # without them, its class has another default
        raise UnsupportedModel(f"{config.source}: 'rope_parameters' is missing")
    positions = read_rope(config, sizes.head_dim, sizes.n_ctx, 12e6)
    block = ATTENTION | HEAD_NORMS | UNGATED | _NORMS
    return replace(decoder(config, "apertus", sizes, block, positions, tied=False), numbers=_NUMBERS)
