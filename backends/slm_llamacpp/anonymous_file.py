"""Files for models that are bytes or tensor sources: llama.cpp reads models only from files."""

from __future__ import annotations

import os
import sys
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path


class AnonymousFile:
    """A file with a content. It is freed when it is closed or garbage-collected.

    On Linux it is in memory, and has no name in any folder; elsewhere it is a temporary file.

    Args:
        pieces: the content, in pieces.

    Attributes:
        path: the path of the file, for this process.

    Raises:
        OSError: there is no space left.
    """

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        if sys.platform == "linux":
            descriptor = os.memfd_create("model.gguf")
            self.path = Path(f"/proc/self/fd/{descriptor}")
            self._finalizer = weakref.finalize(self, os.close, descriptor)
            file = os.fdopen(descriptor, "wb", closefd=False)
        else:
            descriptor, name = tempfile.mkstemp(suffix=".gguf")
            self.path = Path(name)
            self._finalizer = weakref.finalize(self, self.path.unlink, missing_ok=True)
            file = os.fdopen(descriptor, "wb")
        try:
            with file:
                file.writelines(pieces)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the file. Pages that llama.cpp has mapped stay readable. A second call does nothing."""
        self._finalizer()
