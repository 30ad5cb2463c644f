"""qwen3vlmoe: the text model of Qwen3-VL with experts."""

from __future__ import annotations

from slm_core.architectures import qwen3moe
from slm_core.architectures._keys import Keys
from slm_core.architectures._spec import ModelSpec
from slm_core.architectures.qwen3vl import with_interleaved_sections


def spec(keys: Keys) -> ModelSpec:
    """Read a qwen3vlmoe: a qwen3moe with the M-RoPE of a qwen3vl."""
    return with_interleaved_sections(keys, qwen3moe.spec(keys))
