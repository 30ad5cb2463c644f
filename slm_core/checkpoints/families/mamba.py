"""mamba: Mamba. Blocks of one selective state space layer, and nothing else."""

from __future__ import annotations

import math

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.recurrent import channels_state, of_states_alone


def recipe(config: Config) -> Recipe:
    """Read a mamba."""
    n_embd = config.size("hidden_size", 768)
    n_rank = math.ceil(n_embd / 16)
    if config.is_null("time_step_rank"):
        config.neutral("time_step_rank")
    elif "time_step_rank" in config:
        n_rank = config.size("time_step_rank")
    keys = {
        "ssm.conv_kernel": config.size("conv_kernel", 4),
        "ssm.inner_size": config.size("expand", 2) * n_embd,
        "ssm.state_size": config.size("state_size", 16),
        "ssm.time_step_rank": n_rank,
    }
    return of_states_alone(config, "mamba", channels_state("mixer"), keys, tied=True)
