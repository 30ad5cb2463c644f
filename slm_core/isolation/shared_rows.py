"""Memory that both processes see: logits reach the parent without a copy through a socket."""

from __future__ import annotations

import math
import mmap
import os
import sys
import tempfile
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

N_BYTES = 1 << 24
"""The size of the memory, in bytes. Pages take memory when they are first used."""


class SharedRows:
    """Rows of logits of the last call, float32.

    Args:
        descriptor: the file of the memory; it can be closed afterwards.
    """

    def __init__(self, descriptor: int) -> None:
        self._values = np.frombuffer(mmap.mmap(descriptor, N_BYTES), np.float32)

    def close(self) -> None:
        """Free the memory as soon as no rows in it are used."""
        self._values = np.empty(0, np.float32)

    def write(self, rows: NDArray[np.float32]) -> bool:
        """Write rows; returns False if they are too large, or not float32."""
        if rows.dtype != np.float32 or rows.size > len(self._values):
            return False
        np.copyto(self._values[: rows.size].reshape(rows.shape), rows)
        return True

    def read(self, shape: Sequence[int]) -> NDArray[np.float32]:
        """The rows, valid until the next call; their size is not checked."""
        return self._values[: math.prod(shape)].reshape(shape)


def shared_file() -> int:
    """A descriptor of a file for ``SharedRows``, which no other process can open, and which nobody can shorten."""
    if sys.platform != "linux":
        with tempfile.TemporaryFile() as file:
            file.truncate(N_BYTES)
            return os.dup(file.fileno())
    import fcntl

    descriptor = os.memfd_create("slm-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, N_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor
