"""qwen2_vl: Qwen2-VL. The text model is read; its pairs turn by time, height and width."""

from __future__ import annotations

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


def recipe(config: Config) -> Recipe:
    """Read the text model of a qwen2_vl; in new configurations it has a part of its own."""
    config.neutral(*_NEUTRAL.split())
    text = config.part("text_config") if "text_config" in config else config
    if text is not config:
        text.neutral(*_NEUTRAL.split(), "tie_word_embeddings")
    sizes = read_sizes(text)
    text.only("hidden_act", *SILU)
    refuse_windows(text, sizes)
    block = with_biases(ATTENTION, "attn_q", "attn_k", "attn_v") | GATED | NORMS
    found = decoder(config, "qwen2vl", sizes, block, _positions(text, sizes.head_dim), tied=False)
    renamed = {r"^model\.language_model\.": "model.", r"^language_model\.": ""}
    return replace(found, renamed=renamed, unused=rf"{found.unused}|^(model\.)?visual\.")


def _positions(config: Config, head_dim: int) -> Positions:
    """Their kind is "mrope", or the default one with sections."""
    rope = stated_rope(config, 1e6)
    sections = rope.where.items("mrope_section", int, 3)
    if rope.kind not in ("default", "mrope") or sections is None:
        raise UnsupportedModel(
            f"{config.source}: 'rope_type' is {rope.kind[:80]!r}, and 'mrope_section' is {sections} (accepted: mrope or"
            " default, and three sections)"
        )
    keys: dict[str, PlainValue] = {
        "rope.dimension_count": head_dim,
        "rope.freq_base": rope.freq_base,
        "rope.dimension_sections": [*sections, 0],
    }
    return Positions(keys, {})
