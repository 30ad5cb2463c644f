"""gemma3: Gemma 3 with a part that sees images; the text model is read, and works alone."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.families import gemma3_text
from slm_core.checkpoints.recipe import Recipe


def recipe(config: Config) -> Recipe:
    """Read the text model of a gemma3."""
    config.neutral("vision_config", "mm_tokens_per_image", "image_token_index", "image_token_id")
    config.neutral("boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id")
    config.only("tie_word_embeddings", True)
    found = gemma3_text.recipe(config.part("text_config"))
    renamed = {r"^(language_model\.model|model\.language_model)\.": "model.", r"^language_model\.lm_head\.": "lm_head."}
    return replace(found, renamed=renamed, unused=rf"{found.unused}|^(model\.)?(vision_tower|multi_modal_projector)\.")
