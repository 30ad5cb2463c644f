"""qwen3_vl: Qwen3-VL, dense. Only the text model is read: a qwen3 with interleaved M-RoPE."""

from __future__ import annotations

from collections.abc import Mapping

from slm_core.checkpoints.config import Config
from slm_core.checkpoints.decoder import ATTENTION, GATED, HEAD_NORMS, NORMS, SILU, Sizes, decoder, read_sizes
from slm_core.checkpoints.families.qwen2_vl import IMAGES, in_sections, text_alone
from slm_core.checkpoints.recipe import Parts, Recipe
from slm_core.gguf import PlainValue

_N_DEEP = 3  # the default of transformers' class, like the sections
_SECTIONS = (24, 20, 20)


def recipe(config: Config) -> Recipe:
    """Read the text model of a qwen3_vl, and the number of its first blocks that add deepstack rows of an image."""
    sizes = read_sizes(config.part("text_config"), num_key_value_heads=32, head_dim=128)
    return text_model(config, "qwen3vl", sizes, GATED, {})


def text_model(
    config: Config, architecture: str, sizes: Sizes, feed_forward: Parts, metadata: Mapping[str, PlainValue]
) -> Recipe:
    """The text model, with the properties that all Qwen3-VL models share.

    Args:
        config: the configuration of the whole model.
        architecture: its name in GGUF files.
        sizes: the dimensions of the text model.
        feed_forward: the tensors of a feed-forward layer.
        metadata: the metadata of the file.
    """
    config.neutral(*IMAGES)
    vision, text = config.aside("vision_config"), config.part("text_config")
    n_deep = len(vision.integers("deepstack_visual_indexes")) if "deepstack_visual_indexes" in vision else _N_DEEP
    text.only("hidden_act", *SILU)
    text.only("attention_bias", False)
    text.neutral("tie_word_embeddings")
    block = {**ATTENTION, **HEAD_NORMS, **NORMS, **feed_forward}
    positions = in_sections(text, sizes.head_dim, 5e5, _SECTIONS, interleaved=True)
    keys = {"n_deepstack_layers": n_deep, **metadata}
    return text_alone(decoder(config, architecture, sizes, block, positions, tied=False, metadata=keys))
