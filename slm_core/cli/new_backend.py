"""``slm new-backend``: writes a package with a working backend, as a template for another engine."""

from __future__ import annotations

import importlib.resources
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from string import Template
from typing import Annotated, Self

import typer

from slm_core.cli.terminal import note
from slm_core.errors import InvalidOption
from slm_core.plugins import registry
from slm_core.user_paths import expanded

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_SUFFIX = ".in"  # suffix of templates, which are not valid Python


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a package and its parts.

    Attributes:
        name: the name of the backend, as in ``slm chat --backend NAME``.
        package: the name of the Python package.
        distribution: the name of the distribution for pip.
        prefix: the prefix of class names, as in ``PREFIXBackend``.
    """

    name: str
    package: str
    distribution: str
    prefix: str

    @classmethod
    def of(cls, name: str) -> Self:
        """The names for a backend.

        Raises:
            InvalidOption: the name is invalid, or an installed backend has it.
        """
        if not _NAME.fullmatch(name):
            accepted = "lower case letters, digits and underscores, a letter first, 40 characters at most"
            raise InvalidOption(f"a backend cannot be called {name!r} (accepted: {accepted})")
        installed = [status.name for status in registry().statuses()]
        if name in installed:
            raise InvalidOption(f"a backend called {name!r} is installed already (taken: {', '.join(installed)})")
        words = name.split("_")
        return cls(name, f"{name}_backend", "-".join([*filter(None, words), "backend"]), "".join(map(str.title, words)))


def files(names: Names) -> Iterator[tuple[PurePosixPath, str]]:
    """The path of each file in the package's folder, with its text."""
    values = {"name": names.name, "package": names.package, "distribution": names.distribution, "prefix": names.prefix}

    def walk(folder: Traversable, place: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            name = names.package if entry.name == "package" else entry.name.removesuffix(_SUFFIX)
            if entry.is_dir():
                yield from walk(entry, place / name)
            elif entry.name.endswith(_SUFFIX):
                yield place / name, Template(entry.read_text("utf-8")).substitute(values)

    yield from walk(importlib.resources.files("slm_core") / "data" / "backend", PurePosixPath())


def write(names: Names, target: Path) -> None:
    """Write the package into a new folder, all or nothing.

    Raises:
        InvalidOption: the folder exists.
    """
    if target.exists() or target.is_symlink():
        raise InvalidOption(f"{target} exists already: nothing was written")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        whole = Path(folder) / "package"
        for file_path, text in files(names):
            path = whole / file_path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        whole.rename(target)


def new_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the backend, such as tiny.")],
    directory: Annotated[
        Path, typer.Option("--in", metavar="DIR", help="The folder to make the package's folder in.")
    ] = Path(),
) -> None:
    """Write a package with a backend that passes the conformance suite, as a template for your engine."""
    try:
        names = Names.of(name)
        target = expanded(directory) / names.distribution
        write(names, target)
    except InvalidOption as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from error
    note(f"{target}: {sum(1 for _ in files(names))} files. Next: pip install -e '{target}[test]' && pytest {target}")
