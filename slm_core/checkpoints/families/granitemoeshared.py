"""granitemoeshared: Granite 3 with routed experts and a shared expert."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.families.granitemoe import granite_recipe
from slm_core.checkpoints.recipe import Recipe


def recipe(config: Config) -> Recipe:
    """Read a granitemoeshared."""
    return granite_recipe(config, config.count("shared_intermediate_size", 0))
