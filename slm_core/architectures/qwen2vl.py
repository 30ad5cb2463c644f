"""qwen2vl: the text model of Qwen2-VL and Qwen2.5-VL. Positions of text are the same in all sections of its RoPE."""

from __future__ import annotations

from slm_core.architectures import qwen2
from slm_core.architectures._keys import Keys
from slm_core.architectures._spec import ModelSpec


def spec(keys: Keys) -> ModelSpec:
    """Read a qwen2vl as a qwen2, which it is where there are no images."""
    keys.neutral("rope.dimension_sections")
    return qwen2.spec(keys)
