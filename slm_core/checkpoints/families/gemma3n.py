"""gemma3n: Gemma 3n with vision and audio; only the text model is read."""

from __future__ import annotations

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.families import gemma3n_text
from slm_core.checkpoints.multimodal import text_model
from slm_core.checkpoints.recipe import Recipe

_NEUTRAL = """
audio_config audio_soft_tokens_per_image audio_token_id boa_token_id boi_token_id eoa_token_id eoi_token_id
image_token_id vision_config vision_soft_tokens_per_image
"""
_TOWERS = "vision_tower audio_tower embed_vision embed_audio"


def recipe(config: Config) -> Recipe:
    """Read the text model of a gemma3n."""
    return text_model(config, gemma3n_text.recipe, neutral=_NEUTRAL, towers=_TOWERS)
