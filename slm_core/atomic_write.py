"""Files that are whole or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Write a file beside ``path``, which takes its place, and that of any file there, when its data is on the disk.

    Where the body raises, the file is removed and ``path`` is as it was.

    Args:
        path: what it is to be; its directory exists.
        mode: who may read and write it, less the process's umask.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:  # around the opening, too: an interrupt may come when the file is there, but ``open`` has not returned
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
