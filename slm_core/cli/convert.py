"""``slm convert``: writes a model in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slm_core.cli.terminal import note, progress_of
from slm_core.paths import local
from slm_core.plugins import registry
from slm_core.user_paths import expanded


def _formats(incomplete: str) -> list[str]:
    return [name for name in registry().converters if name.startswith(incomplete)]


def convert(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A GGUF file, a directory of a model, or hf://user/repo:TYPE.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The new file or folder; an empty folder is accepted.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="The format: gguf (of a directory), onnx (of a GGUF file), or a plugin's.",
            autocompletion=_formats,
        ),
    ],
) -> None:
    """Write a model in another format, for other programs to load."""
    write, target = registry().converter(to), expanded(target)
    with progress_of(f"Converting {model.name}") as progress:
        write(local(model), target, progress or (lambda share: None))
    files = [target] if target.is_file() else [file for file in target.rglob("*") if file.is_file()]
    n_files = "1 file" if len(files) == 1 else f"{len(files)} files"
    note(f"{target}: {n_files}, {sum(file.stat().st_size for file in files) / 1e6:,.1f} MB")
