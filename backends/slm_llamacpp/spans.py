"""Which models llama.cpp can run without a causal mask, so that tokens of a batch see each other both ways."""

from __future__ import annotations

from slm_core.architectures import ModelSpec, read_spec
from slm_core.errors import ModelError
from slm_core.gguf import GgufFile

_ANY = 2**31 - 1


def spans_of(gguf: GgufFile) -> tuple[int, float]:
    """How long a span may be, 0 for none, and the factor with which a row of the table stands for a token.

    Layers have to attend, to distances that do not matter; a window that is shorter than a span would part it. Files
    of architectures that are not declared here say too little.
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
