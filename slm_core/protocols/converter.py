"""The noun Converter: writes a model in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from slm_core.types import Progress


class Converter(Protocol):
    """Writes a model in another format."""

    def __call__(self, source: Path, target: Path, progress: Progress, /) -> None:
        """Convert a model.

        Args:
            source: a GGUF file, or a directory of a model; a converter may accept only one of them.
            target: the new file or folder; written completely or not at all.
            progress: called with the share that is done, 0.0 to 1.0.

        Raises:
            InvalidModelFile, UnsupportedModel: the file is damaged, or cannot be converted.
            InvalidOption: the target exists already, or cannot be written.
        """
        ...
