"""Pointers of Git LFS: a clone without ``git lfs`` has these texts in place of large files."""

from __future__ import annotations

from slm_core.errors import InvalidModelFile

_BEGINNING = b"version https://git-lfs.github.com/spec/"
LONGEST = len(_BEGINNING)
"""The number of bytes that identify a pointer."""


def refuse_pointer(path: object, data: bytes) -> None:
    """Refuse a file whose content begins with ``data``, if it is a pointer.

    Raises:
        InvalidModelFile: it is.
    """
    if data.startswith(_BEGINNING):
        raise InvalidModelFile(
            f"{path}: a pointer of Git LFS in place of the file: run 'git lfs pull' in its folder, or download the file"
        )
