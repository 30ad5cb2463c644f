"""Directories of models that see or hear: the text model is read, and works alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.recipe import Recipe

_RENAMED = {r"^(language_model\.model|model\.language_model)\.": "model.", r"^language_model\.lm_head\.": "lm_head."}
"""How old and new directories name the text model's tensors."""


def text_model(config: Config, read: Callable[[Config], Recipe], *, neutral: str, towers: str) -> Recipe:
    """The text model of a directory that holds others beside it.

    Args:
        config: of the whole model; the text model's is a part of it.
        read: reads that part.
        neutral: keys of the others, between spaces.
        towers: how names of the others' tensors begin, up to a dot, between spaces.
    """
    config.neutral(*neutral.split())
    config.only("tie_word_embeddings", True)
    found = read(config.part("text_config"))
    unused = rf"{found.unused}|^(model\.)?({'|'.join(towers.split())})\."
    return replace(found, renamed=_RENAMED, unused=unused)
