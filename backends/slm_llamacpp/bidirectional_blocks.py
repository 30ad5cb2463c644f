"""Bidirectional blocks: models that llama.cpp can run without a causal mask."""

from __future__ import annotations

from slm_core.architectures import ModelSpec, read_spec
from slm_core.errors import ModelError
from slm_core.gguf import GgufFile

_ANY = 2**31 - 1


def blocks_of(gguf: GgufFile) -> tuple[int, float]:
    """The longest bidirectional block (0 for none), and the factor from a row of the embedding table to an input.

    Models with recurrent layers, chunks or ALiBi have no blocks, and neither have unknown architectures. A window
    limits the length of a block.
    """
    try:
        spec = read_spec(gguf)
    except ModelError:
        return 0, 1.0
    return _longest(spec), 1.0 if spec.scales_rows else spec.embedding_scale


def _longest(spec: ModelSpec) -> int:
    if not spec.causal or spec.alibi_max_bias is not None:
        return 0
    if any(layer.recurrent is not None or layer.chunk is not None for layer in spec.layers):
        return 0
    return min((layer.window for layer in spec.layers if layer.window is not None), default=_ANY)
