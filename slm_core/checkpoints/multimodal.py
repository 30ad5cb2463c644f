"""Directories of multimodal models: only the text model is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.recipe import Recipe

_RENAMED = {r"^(language_model\.model|model\.language_model)\.": "model.", r"^language_model\.lm_head\.": "lm_head."}
"""The prefixes of the text model's tensors in old and new directories."""


def text_model(config: Config, read: Callable[[Config], Recipe], *, neutral: str, towers: str) -> Recipe:
    """The text model of a directory with encoders of images or sound.

    Args:
        config: the configuration of the whole model; one section is for the text model.
        read: reads this section.
        neutral: keys of the other models, separated by spaces.
        towers: prefixes of the other models' tensors, up to a dot, separated by spaces.
    """
    config.neutral(*neutral.split())
    config.only("tie_word_embeddings", True)
    recipe = read(config.part("text_config"))
    unused = rf"{recipe.unused}|^(model\.)?({'|'.join(towers.split())})\."
    return replace(recipe, renamed=_RENAMED, unused=unused)
