"""Directories of Hugging Face models (``config.json``, safetensors), presented as GGUF files.

Each ``model_type`` has one file in ``families``; there is no list of families.
"""

from __future__ import annotations

from pathlib import Path

from slm_core.checkpoints.checkpoint import Checkpoint
from slm_core.checkpoints.gguf_config import config_of
from slm_core.checkpoints.reading import WORLD, Sources, family_names, sources_of, vocabulary_of
from slm_core.checkpoints.store import INDEX, SINGLE
from slm_core.gguf import GgufFile
from slm_core.types import ModelSource

__all__ = [
    "INDEX",
    "SINGLE",
    "WORLD",
    "Checkpoint",
    "Sources",
    "config_of",
    "family_names",
    "open_model",
    "sources_of",
    "vocabulary_of",
]


def open_model(source: ModelSource) -> GgufFile | Checkpoint:
    """Open a GGUF file, its content in memory, an object with tensors, or a model's directory.

    Raises:
        InvalidModelFile, UnsupportedModel: see ``GgufFile.open`` and ``Checkpoint``.
    """
    if isinstance(source, Path) and source.is_dir():
        return Checkpoint(source)
    return GgufFile.open(source)
