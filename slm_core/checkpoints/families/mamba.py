"""mamba: Mamba. Each block is one selective state space layer."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.recurrent import channels_keys, channels_state, of_states_alone


def recipe(config: Config) -> Recipe:
    """Read a mamba."""
    return of_states_alone(config, "mamba", channels_state("mixer"), channels_keys(config), tied=True)
