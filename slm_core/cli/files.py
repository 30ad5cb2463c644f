"""Files that users name: completion of their paths, and their text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slm_core.errors import InvalidOption


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


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        OSError: the file cannot be read.
        InvalidOption: it is not UTF-8.
    """
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidOption(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
