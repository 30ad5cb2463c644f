"""The noun Converter: writes a model in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from slm_core.types import Progress


class Converter(Protocol):
    """Writes a GGUF file in another format."""

    def __call__(self, source: Path, target: Path, progress: Progress, /) -> None:
        """Convert a model.

        Args:
            source: the GGUF file.
            target: what to make, a file or a folder; it is there whole or not at all.
            progress: hears the share that is done.

        Raises:
            InvalidModelFile, UnsupportedModel: the file is damaged, or not of a kind that is converted.
            InvalidOption: the target is there already, or cannot be written.
        """
        ...
