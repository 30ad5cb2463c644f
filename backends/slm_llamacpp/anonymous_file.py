"""A file of bytes, for llama.cpp, which reads models from files alone."""

from __future__ import annotations

import os
import sys
import tempfile
import weakref
from pathlib import Path


class AnonymousFile:
    """A file with a content, freed when it is closed or garbage.

    On Linux it is in memory, and has no name in any folder; elsewhere it is a temporary file.

    Args:
        data: the content.

    Attributes:
        path: the path of the file, for this process.

    Raises:
        OSError: there is no room.
    """

    def __init__(self, data: bytes) -> None:
        if sys.platform == "linux":
            descriptor = os.memfd_create("model.gguf")
            self.path = Path(f"/proc/self/fd/{descriptor}")
            self._finalizer = weakref.finalize(self, os.close, descriptor)
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(data)
        else:
            descriptor, name = tempfile.mkstemp(suffix=".gguf")
            self.path = Path(name)
            self._finalizer = weakref.finalize(self, self.path.unlink, missing_ok=True)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)

    def close(self) -> None:
        """Free it. What llama.cpp has mapped stays readable. Twice is fine."""
        self._finalizer()
