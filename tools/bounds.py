"""Print requirements with the oldest, or the newest, versions that pyproject.toml allows.

``make test-bounds`` passes them to pip: ``bounds.py oldest`` prints ``numpy==1.26 ...``, ``bounds.py newest`` names.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("onnx",)
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "gguf")
"""Requirements of the tests. The bounds of these packages are not tested."""


def pinned(requirements: list[str]) -> list[str]:
    """Each requirement at its lower bound.

    Raises:
        ValueError: one is not of the form ``name>=version``.
    """
    pins = []
    for requirement in requirements:
        name, bound, version = requirement.partition(">=")
        if not bound or not version.replace(".", "").isdigit():
            raise ValueError(f"{requirement!r} in {PYPROJECT.name} is not of the form name>=version")
        pins.append(f"{name}=={version}")
    return pins


def requirements(which: str) -> Iterator[str]:
    """The requirements to install; ``which`` is "oldest" or "newest"."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    bounded = [*project["dependencies"], *(line for name in EXTRAS for line in project["optional-dependencies"][name])]
    oldest = pinned(bounded)
    yield from {"oldest": oldest, "newest": [line.partition("==")[0] for line in oldest]}[which]
    yield from TOOLS


if __name__ == "__main__":
    print(*requirements(sys.argv[1]))
