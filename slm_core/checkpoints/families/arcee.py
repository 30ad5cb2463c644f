"""arcee: AFM. A llama whose feed-forward layer has no gate and squares a ReLU."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, NORMS, UNGATED, decoder, interleaved, read_sizes
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.rope import read_rope


def recipe(config: Config) -> Recipe:
    """Read an arcee."""
    sizes = read_sizes(config, eps=1e-5)
    config.only("hidden_act", "relu2")
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    block = interleaved(ATTENTION, sizes) | UNGATED | NORMS
    return decoder(config, "arcee", sizes, block, read_rope(config, sizes.head_dim, sizes.n_ctx), tied=False)
