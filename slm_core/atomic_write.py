"""Atomic writing of files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from slm_core.errors import InvalidOption


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Write a temporary file in the directory of ``path``, which replaces ``path`` when its data is on the disk.

    If the body raises, the temporary file is removed, and ``path`` is unchanged.

    Args:
        path: the file to write; its directory exists.
        mode: the permissions, reduced by the umask of the process.

    Raises:
        OSError: the file cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:  # includes ``open``: an interrupt may come after the file is created, but before ``open`` returns
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, whole or not at all.

    Raises:
        InvalidOption: the file cannot be written.
    """
    try:
        with atomic_file(Path(path).expanduser()) as file:
            file.write(data)
    except OSError as error:
        raise InvalidOption(f"{os.fspath(path)}: cannot be written: {error.strerror}") from error


def read_whole(path: str | os.PathLike[str]) -> bytes:
    """The content of a file.

    Raises:
        InvalidOption: the file cannot be read.
    """
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidOption(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error
