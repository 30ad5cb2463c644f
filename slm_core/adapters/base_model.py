"""The properties of a model that are needed to read its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from slm_core.checkpoints import Checkpoint, config_of
from slm_core.gguf import WeightSource


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The tensors of a model, and its configuration.

    Attributes:
        architecture: the architecture in the file.
        shapes: the shape of each tensor, rows first.
        n_layers: the number of layers, without layers for multi-token prediction (MTP).
        n_embd: embedding width E.
        config: ``config.json`` of the directory; for a GGUF file, the part that its metadata state.
        is_file: whether it is a GGUF file.
    """

    architecture: str
    shapes: Mapping[str, tuple[int, ...]]
    n_layers: int
    n_embd: int
    config: Mapping[str, Any]
    is_file: bool = False

    @classmethod
    def of(cls, source: WeightSource) -> Self:
        """The base model in an open file or directory."""
        shapes = {name: info.shape for name, info in source.tensors.items()}
        is_file = not isinstance(source, Checkpoint)
        config = source.config if isinstance(source, Checkpoint) else config_of(source)
        architecture = source.require("general.architecture", str)
        n_layers, n_embd = (source.require(f"{architecture}.{key}", int) for key in ("block_count", "embedding_length"))
        n_layers -= source.get(f"{architecture}.nextn_predict_layers", int, 0)
        return cls(architecture, shapes, n_layers, n_embd, config, is_file)
