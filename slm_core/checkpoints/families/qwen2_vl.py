"""qwen2_vl: Qwen2-VL. Only the text model is read; it has M-RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, NORMS, SILU, decoder, read_sizes, with_biases
from slm_core.checkpoints.families.qwen2 import refuse_windows
from slm_core.checkpoints.recipe import Recipe
from slm_core.checkpoints.rope import Positions, stated_rope
from slm_core.errors import UnsupportedModel
from slm_core.gguf import PlainValue

_NEUTRAL = """
image_token_id video_token_id vision_config vision_end_token_id vision_start_token_id vision_token_id
"""
IMAGES = frozenset(_NEUTRAL.split())
"""Keys of the vision model."""


def recipe(config: Config) -> Recipe:
    """Read the text model of a qwen2_vl; new configurations have it in a section."""
    config.neutral(*IMAGES)
    text = config.part("text_config") if "text_config" in config else config
    if text is not config:
        text.neutral(*IMAGES, "tie_word_embeddings")
    sizes = read_sizes(text)
    text.only("hidden_act", *SILU)
    refuse_windows(text, sizes)
    block = with_biases(ATTENTION, "attn_q", "attn_k", "attn_v") | GATED | NORMS
    return text_alone(decoder(config, "qwen2vl", sizes, block, in_sections(text, sizes.head_dim, 1e6), tied=False))


def text_alone(recipe: Recipe) -> Recipe:
    """``recipe`` for a directory with a vision tower and the text model."""
    renamed = {r"^model\.language_model\.": "model.", r"^language_model\.": ""}
    return replace(recipe, renamed=renamed, unused=rf"{recipe.unused}|^(model\.)?visual\.")


def in_sections(
    config: Config, head_dim: int, freq_base: float, sections: Sequence[int] | None = None, *, interleaved: bool = False
) -> Positions:
    """M-RoPE positions: the kind is "mrope", or the default kind with sections.

    Args:
        config: the configuration.
        head_dim: D.
        freq_base: the default base.
        sections: the default sections; None if they are required.
        interleaved: whether the pairs of time, height and width are interleaved, instead of in contiguous sections.

    Raises:
        UnsupportedModel: another kind, another order, or no sections.
    """
    rope = stated_rope(config, freq_base)
    sections = rope.where.items("mrope_section", int, 3) or sections
    if rope.kind not in ("default", "mrope") or sections is None:
        raise UnsupportedModel(
            f"{config.source}: 'rope_type' is {rope.kind[:80]!r}, and 'mrope_section' is {sections} (accepted: mrope or"
            " default, and three sections)"
        )
    rope.where.only("mrope_interleaved", interleaved)
    keys: dict[str, PlainValue] = {
        "rope.dimension_count": head_dim,
        "rope.freq_base": rope.freq_base,
        "rope.dimension_sections": [*sections, 0],
    }
    return Positions(keys, {})
