"""llama4: Llama 4 with vision; only the text model is read."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.families import llama4_text
from slm_core.checkpoints.recipe import Recipe


def recipe(config: Config) -> Recipe:
    """Read the text model of a llama4."""
    config.neutral("vision_config", "image_token_index", "boi_token_index", "eoi_token_index")
    config.only("tie_word_embeddings", False)
    base = llama4_text.recipe(config.part("text_config"))
    return replace(
        base,
        renamed={r"^language_model\.model\.": "model.", r"^language_model\.lm_head\.": "lm_head."},
        unused=rf"{base.unused}|^(vision_model|multi_modal_projector)\.",
    )
