"""qwen3vl: the text model of Qwen3-VL. Positions of text are the same in all sections of its RoPE."""

from __future__ import annotations

from slm_core.architectures import qwen3
from slm_core.architectures._keys import Keys
from slm_core.architectures._spec import ModelSpec


def spec(keys: Keys) -> ModelSpec:
    """Read a qwen3vl as a qwen3, which it is where there are no images."""
    keys.neutral("rope.dimension_sections", "n_deepstack_layers")
    return qwen3.spec(keys)
