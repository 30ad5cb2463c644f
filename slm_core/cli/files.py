"""Files that users name: completion of their paths, and their text."""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from slm_core.atomic_write import check_regular
from slm_core.errors import InvalidOption
from slm_core.user_paths import expanded


def paths(argument: str) -> Sequence[str]:
    """The files and directories whose paths begin with ``argument``."""
    name = argument.rpartition("/")[2]
    folder = argument.removesuffix(name)
    try:
        matching = sorted(path for path in Path(folder or ".").expanduser().iterdir() if path.name.startswith(name))
    except (OSError, RuntimeError):  # no such directory, or no such user
        return ()
    hidden = name.startswith(".")
    return [folder + p.name + ("/" if p.is_dir() else "") for p in matching if hidden or not p.name.startswith(".")]


def complete_path(incomplete: str) -> list[str]:
    """``paths``, for the completion of typer."""
    return list(paths(incomplete))


def read_stdin(errors: Literal["strict", "replace"] = "strict") -> str:
    """All of standard input, without a byte order mark.

    Raises:
        InvalidOption: it is not text in the encoding of the locale, UTF-8 nearly everywhere.
    """
    if errors == "replace" and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors=errors)
    try:
        return sys.stdin.read().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        reason = f"{error.reason} at byte {error.start}"
        raise InvalidOption(f"standard input is not {error.encoding.upper()} text: {reason}") from error


def read_text(path: Path, errors: Literal["strict", "replace"] = "strict") -> str:
    """The text of a regular file or of a pipe, such as ``<(command)`` in a shell, without a byte order mark.

    Raises:
        OSError: the file cannot be read, or is a device.
        InvalidOption: it is not UTF-8.
    """
    path = expanded(path)
    check_regular(path, or_pipe=True)
    try:
        return path.read_text(encoding="utf-8-sig", errors=errors)
    except UnicodeDecodeError as error:
        if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            hint = "accepted: UTF-8, which PowerShell writes with Set-Content -Encoding utf8"
            raise InvalidOption(f"{path} is UTF-16 text ({hint})") from error
        raise InvalidOption(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
