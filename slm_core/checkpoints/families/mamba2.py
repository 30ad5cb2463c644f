"""mamba2: Mamba 2, Codestral Mamba. Each block is one selective state space layer with heads."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.recurrent import heads_keys, heads_state, of_states_alone


def recipe(config: Config) -> Recipe:
    """Read a mamba2."""
    keys = heads_keys(config, "", config.size("expand", 2) * config.size("hidden_size"))
    config.neutral("norm_before_gate", "time_step_rank")  # never read
    block = heads_state("mixer", int(str(keys["ssm.group_count"])))
    return of_states_alone(config, "mamba2", block, keys, tied=False)
