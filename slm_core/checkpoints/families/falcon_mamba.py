"""falcon_mamba: Falcon Mamba. A mamba that divides step sizes, B and C by their root mean square."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.recurrent import channels_keys, channels_state, of_states_alone
from slm_core.gguf import OWN


def recipe(config: Config) -> Recipe:
    """Read a falcon_mamba; GGUF has one epsilon for all norms, so a second epsilon has a key of our own."""
    keys = channels_keys(config) | {"ssm.dt_b_c_rms": True}
    eps = config.number("mixer_rms_eps", 1e-6)
    if eps != config.number("layer_norm_epsilon", 1e-5):
        keys[f"{OWN}ssm.norm_epsilon"] = eps
    config.neutral("use_falcon_mambapy")
    return of_states_alone(config, "mamba", channels_state("mixer"), keys, tied=True)
