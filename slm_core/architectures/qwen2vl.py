"""qwen2vl: the text model of Qwen2-VL and Qwen2.5-VL. Positions of text are the same in all sections of its RoPE."""

from __future__ import annotations

from dataclasses import replace

from slm_core.architectures import qwen2
from slm_core.architectures._keys import Keys
from slm_core.architectures._spec import ModelSpec
from slm_core.errors import InvalidModelFile


def spec(keys: Keys) -> ModelSpec:
    """Read a qwen2vl: a qwen2 with M-RoPE, in contiguous sections for time, height and width."""
    whole = qwen2.spec(keys)
    time, height, width = read_sections(keys, whole)
    return with_sections(whole, (0,) * time + (1,) * height + (2,) * width)


def read_sections(keys: Keys, whole: ModelSpec) -> tuple[int, int, int]:
    """The numbers of pairs for time, height and width; the fourth number in files is 0."""
    time, height, width, fourth = keys.counts("rope.dimension_sections", 4)
    n_pairs = (whole.layers[0].rope.n_dims if whole.layers[0].rope else 0) // 2
    if time + height + width != n_pairs or fourth:
        raise InvalidModelFile(
            f"{keys.gguf.path}: metadata '{keys.architecture}.rope.dimension_sections' is"
            f" {[time, height, width, fourth]} (accepted: three numbers that add up to {n_pairs}, and 0)"
        )
    return time, height, width


def with_sections(whole: ModelSpec, sections: tuple[int, ...]) -> ModelSpec:
    """``whole`` with M-RoPE sections."""
    layers = [
        replace(layer, rope=None if layer.rope is None else replace(layer.rope, sections=sections))
        for layer in whole.layers
    ]
    return replace(whole, layers=tuple(layers))
