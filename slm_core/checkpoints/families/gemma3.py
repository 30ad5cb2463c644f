"""gemma3: Gemma 3 with vision; only the text model is read."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.families import gemma3_text
from slm_core.checkpoints.multimodal import text_model
from slm_core.checkpoints.recipe import Recipe

_NEUTRAL = """
boi_token_id boi_token_index eoi_token_id eoi_token_index image_token_id image_token_index mm_tokens_per_image
vision_config
"""


def recipe(config: Config) -> Recipe:
    """Read the text model of a gemma3."""
    return text_model(config, gemma3_text.recipe, neutral=_NEUTRAL, towers="vision_tower multi_modal_projector")
