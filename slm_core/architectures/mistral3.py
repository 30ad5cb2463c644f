"""mistral3: Ministral 3. A llama that scales queries beyond its original training context."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures import llama
from slm_core.architectures._keys import Keys
from slm_core.architectures._spec import ModelSpec, TemperatureSpec


def spec(keys: Keys) -> ModelSpec:
    """Read a mistral3."""
    whole = llama.spec(keys)
    keys.neutral("attention.temperature_length")  # equals the original context length
    scale = keys.number("attention.temperature_scale", 0.0, zero=True)
    if not scale:
        return whole
    temperature = TemperatureSpec(scale, keys.size("rope.scaling.original_context_length"))
    return replace(whole, layers=tuple(replace(layer, temperature=temperature) for layer in whole.layers))
