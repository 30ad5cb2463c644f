"""The model that adapters change, as far as reading adapters needs it."""

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
        config: ``config.json`` of the directory; for a GGUF file, what its metadata say of it.
        is_file: whether it is a GGUF file.
    """

    architecture: str
    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]
    is_file: bool = False

    @classmethod
    def of(cls, source: WeightSource) -> Self:
        """The base model in an open file or directory."""
        shapes = {name: info.shape for name, info in source.tensors.items()}
        is_file = not isinstance(source, Checkpoint)
        config = source.config if isinstance(source, Checkpoint) else config_of(source)
        return cls(source.require("general.architecture", str), shapes, config, is_file)
