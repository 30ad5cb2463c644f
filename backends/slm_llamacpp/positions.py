"""Limits of positions, and windows that llama.cpp ignores or cannot have."""

from __future__ import annotations

from typing import NamedTuple

from slm_core.architectures import read_spec
from slm_core.errors import UnsupportedModel
from slm_core.gguf import GgufFile

_POSITIONS = "position_embd.weight"
_WITHOUT_WINDOWS = ("llama", "phi3", "starcoder2")
"""Architectures whose files may have a window that llama.cpp ignores."""
_LAYERS_WITH_WINDOWS = {"exaone4": 64}
"""Architectures of which llama.cpp has windows only in models of this number of layers."""


class PositionLimit(NamedTuple):
    """The number of positions of a sequence, and the reason, which begins an error message."""

    n_positions: int
    reason: str


def position_limit(gguf: GgufFile) -> PositionLimit | None:
    """The limit of a file's positions; None if there is none.

    Up to the size of an ignored window, all positions are in the window, so the logits are those of the model.
    """
    if _POSITIONS in gguf.tensors:
        return PositionLimit(gguf.tensors[_POSITIONS].shape[0], "this model has learned positions")
    architecture = gguf.require("general.architecture", str)
    window = gguf.get(f"{architecture}.attention.sliding_window", int, 0)
    if architecture not in _WITHOUT_WINDOWS or not window:
        return None
    reason = f"llama.cpp ignores this {architecture} model's window of {window}, so it is exact at positions"
    return PositionLimit(window, reason)


def check_windows(gguf: GgufFile, architecture: str) -> None:
    """Refuse windows in layers where llama.cpp has none, and a window without a layer, which would end the process.

    Raises:
        UnsupportedModel: see above.
    """
    key = f"{architecture}.attention.sliding_window"
    window = gguf.metadata.get(key)
    if not isinstance(window, int) or not window:
        return
    n_layers = gguf.require(f"{architecture}.block_count", int)
    expected = _LAYERS_WITH_WINDOWS.get(architecture, n_layers)
    if n_layers != expected:
        raise UnsupportedModel(
            f"{gguf.path}: metadata {key!r} in a model of {n_layers} layers: llama.cpp has windows in {architecture}"
            f" models of {expected} layers only"
        )
    try:
        layers = read_spec(gguf, strict=False).layers
    except UnsupportedModel:  # only unsupported by this package's own forward pass
        return
    if all(layer.window is None and layer.chunk is None for layer in layers):
        raise UnsupportedModel(f"{gguf.path}: metadata {key!r} is a window, and no layer has it: llama.cpp needs one")
