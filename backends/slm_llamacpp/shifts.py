"""Whether llama.cpp can move a model's keys to other positions as the contract requires.

It re-rotates the keys of every layer, and multiplies them by the magnitude of YaRN or LongRoPE a second time.
"""

from __future__ import annotations

from slm_core.architectures import POSITIONS
from slm_core.gguf import GgufFile

_WITH_UNROTATED_LAYERS = frozenset({"smollm3", "llama4"})


def moves_keys(gguf: GgufFile) -> bool:
    """Whether a context supports cuts: RoPE rotates all keys without scaling, and nothing else depends on positions."""
    architecture = gguf.require("general.architecture", str)
    prefix = f"{architecture}.rope.scaling"
    has_magnitude = gguf.get(f"{prefix}.attn_factor", float, 1.0) != 1
    if gguf.get(f"{prefix}.type", str, "none") == "yarn":
        has_magnitude |= gguf.get(f"{prefix}.yarn_log_multiplier", float, 0.0) != 1
    is_unrotated = architecture in _WITH_UNROTATED_LAYERS
    if architecture.startswith("granite"):
        is_unrotated = not gguf.get(f"{prefix}.finetuned", bool, True)
    return not is_unrotated and not has_magnitude and POSITIONS not in gguf.tensors
