"""qwen3vl: the text model of Qwen3-VL. Positions of text are the same in all sections of its RoPE."""

from __future__ import annotations

from slm_core.architectures import qwen3
from slm_core.architectures._keys import Keys
from slm_core.architectures._spec import ModelSpec
from slm_core.architectures.qwen2vl import read_sections, with_sections


def spec(keys: Keys) -> ModelSpec:
    """Read a qwen3vl: a qwen3 with interleaved M-RoPE: time, height, width, then time for the remaining pairs.

    Models with DeepStack are read as a qwen3, which is equivalent for text.
    """
    return with_interleaved_sections(keys, qwen3.spec(keys))


def with_interleaved_sections(keys: Keys, whole: ModelSpec) -> ModelSpec:
    """``whole`` with interleaved M-RoPE; unchanged for models with DeepStack.

    Raises:
        InvalidModelFile: the sections do not add up to a head's pairs.
    """
    time, height, width = read_sections(keys, whole)
    if keys.count("n_deepstack_layers", 0):
        return whole
    sections = [0] * (time + height + width)
    for index, n_pairs in ((1, height), (2, width)):
        sections[index : 3 * n_pairs : 3] = [index] * len(sections[index : 3 * n_pairs : 3])
    return with_sections(whole, tuple(sections))
