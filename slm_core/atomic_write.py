"""Reading and atomic writing of regular files."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from slm_core.errors import InvalidOption
from slm_core.user_paths import expanded

_NAME_CHARS = 50
"""Characters of a file's name in the name of its temporary file, which must not exceed 255 bytes."""


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Write a temporary file in the directory of ``path``, which replaces ``path`` when its data is on the disk.

    If the body raises, the temporary file is removed, and ``path`` is unchanged. A symbolic link stays: the file that
    it points to is replaced.

    Args:
        path: the file to write; its directory exists.
        mode: the permissions, reduced by the umask of the process.

    Raises:
        OSError: the file cannot be written, or ``path`` is a pipe, a device or another file that is not regular.
    """
    path = Path(os.path.realpath(path))
    with suppress(FileNotFoundError):
        check_regular(path)
    part = path.with_name(f".{path.name[:_NAME_CHARS]}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:  # includes ``open``: an interrupt may come after the file is created, but before ``open`` returns
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def check_new_file(path: Path, sources: Iterable[Path], n_bytes: int = 0, *, force: bool = False) -> None:
    """Check, before a long computation, that a new file can be written.

    Args:
        path: the new file.
        sources: the files that are read; the new file never replaces them.
        n_bytes: the size of the new file.
        force: an existing file is replaced.

    Raises:
        InvalidOption: there is no folder or no room, a file exists without ``force``, or it is one of the sources.
    """
    if not path.parent.is_dir():
        raise InvalidOption(f"{path}: there is no folder {path.parent}")
    if path.exists():
        if not path.is_file():
            raise InvalidOption(f"{path}: not a file")
        if any(path.samefile(source) for source in sources):
            raise InvalidOption(f"{path}: the new file cannot be the one that is read")
        if not force:
            raise InvalidOption(f"{path}: there is a file already (to replace it: force)")
    free = shutil.disk_usage(path.parent).free
    if n_bytes > free:
        raise InvalidOption(f"{path}: {n_bytes / 1e6:,.0f} MB are needed, and {free / 1e6:,.0f} MB free in its folder")


def check_regular(path: Path, *, or_pipe: bool = False) -> None:
    """Refuse a path that is not a regular file: a device has no end, and opening a pipe waits for its other end.

    Args:
        path: a file or a link to one.
        or_pipe: accept a pipe, too.

    Raises:
        OSError: there is no such file, or it is not a regular file.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode) and not (or_pipe and stat.S_ISFIFO(mode)):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    check_regular(path)
    return path.read_bytes()


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, whole or not at all.

    Raises:
        InvalidOption: the file cannot be written.
    """
    try:
        with atomic_file(expanded(path)) as file:
            file.write(data)
    except OSError as error:
        raise InvalidOption(f"{os.fspath(path)}: cannot be written: {error.strerror}") from error


def read_whole(path: str | os.PathLike[str]) -> bytes:
    """The content of a file.

    Raises:
        InvalidOption: the file cannot be read.
    """
    try:
        return read_regular(expanded(path))
    except OSError as error:
        raise InvalidOption(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error
