"""gemma3n: Gemma 3n with parts that see images and hear; the text model is read, and works alone."""

from __future__ import annotations

from dataclasses import replace

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.families import gemma3n_text
from slm_core.checkpoints.recipe import Recipe

_NEUTRAL = """
audio_config audio_soft_tokens_per_image audio_token_id boa_token_id boi_token_id eoa_token_id eoi_token_id
image_token_id vision_config vision_soft_tokens_per_image
"""


def recipe(config: Config) -> Recipe:
    """Read the text model of a gemma3n."""
    config.neutral(*_NEUTRAL.split())
    config.only("tie_word_embeddings", True)
    found = gemma3n_text.recipe(config.part("text_config"))
    return replace(
        found,
        renamed={
            r"^(language_model\.model|model\.language_model)\.": "model.",
            r"^language_model\.lm_head\.": "lm_head.",
        },
        unused=rf"{found.unused}|^(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\.",
    )
