"""Paths from callers: expands home directories, and refuses texts that cannot be a path."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from slm_core.errors import InvalidOption


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path in which a home directory has replaced ``~`` or ``~user``.

    Raises:
        InvalidOption: the value is no path.
        FileNotFoundError: there is no such user.
        OSError: no file can have this path: it contains a NUL or half a surrogate pair.
    """
    text = text_of(path)
    try:
        if "\0" in text:
            raise OSError(errno.EINVAL, "no path contains a NUL character", text)
        file = Path(path).expanduser()
        os.fsencode(file)
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "no such user", text) from None
    except UnicodeEncodeError as error:
        raise OSError(errno.EINVAL, f"no path contains {error.object[error.start]!a}", text) from None
    return file


def text_of(path: str | os.PathLike[str], name: str = "path") -> str:
    """A path as a text.

    Raises:
        InvalidOption: the value is no path; the message begins with ``name``.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise InvalidOption(f"{name}={path!r:.80} (accepted: a path)")
    return text


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file or directory; False for a text that cannot be a path."""
    return os.path.exists(path)  # noqa: PTH110  # Path.exists raises for a name that is too long


def option_path(name: str, path: str | os.PathLike[str]) -> Path:
    """``expanded``, for the value of an option.

    Raises:
        InvalidOption: the value is not a path, or a text that cannot be a path, such as an empty text.
    """
    text = text_of(path, name)
    if not text:
        raise InvalidOption(f"{name}='' (accepted: a path)")
    try:
        return expanded(path)
    except OSError as error:
        raise InvalidOption(f"{name}={text!a:.80}: {error.strerror}") from None
