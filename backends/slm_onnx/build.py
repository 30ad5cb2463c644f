"""The installed builds of ONNX Runtime and onnx, and whether they are recent enough. Imports neither."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from slm_onnx import INSTALL_HINT

OLDEST = (1, 25)
"""The first ONNX Runtime with ``TensorScatter``, which edits the KV cache; the same as in pyproject.toml."""
OLDEST_ONNX = (1, 17)
"""The oldest onnx with which the conformance suite passes; the same as in pyproject.toml."""

_LIBRARIES = ("*.so*", "*.dll", "*.dylib", "*.pyd")


@dataclass(frozen=True, slots=True)
class Build:
    """One build of ONNX Runtime. There is one package per kind of hardware, all with the same module.

    Attributes:
        package: its name on PyPI, as "onnxruntime-gpu".
        version: "1.31.1".
        folder: the folder of its libraries.
    """

    package: str
    version: str
    folder: Path

    def stamp(self) -> list[str]:
        """Name, size and modification time of each of its libraries."""
        files = sorted(file for pattern in _LIBRARIES for file in self.folder.glob(pattern))
        return [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]


def find_build() -> Build | None:
    """The installed build; None if there is none. Unknown attributes are ""."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "capi"
    try:
        text = (folder / "build_and_package_info.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    fields = dict(re.findall(r"^(package_name|__version__) *= *['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return Build(fields.get("package_name", "onnxruntime"), fields.get("__version__", ""), folder)


def numbers(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version; None if it does not have two."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def problem() -> str | None:
    """A message about a missing or too old package; None if there is no problem."""
    absent = [name for name in ("onnxruntime", "onnx") if importlib.util.find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed (to get it: {INSTALL_HINT})"
    build = find_build()
    if build is not None and _is_older(build.version, OLDEST):
        return (
            f"{build.package} {build.version} is too old: it lacks the operator TensorScatter, which edits the KV cache"
            f" (needed: {_spelled(OLDEST)} or later)"
        )
    if _is_older(version := _onnx_version(), OLDEST_ONNX):
        return f"onnx {version} is too old (needed: {_spelled(OLDEST_ONNX)} or later)"
    return None


def _onnx_version() -> str:
    try:
        return importlib.metadata.version("onnx")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return ""


def _is_older(version: str, oldest: tuple[int, int]) -> bool:
    """Whether a version is known and older than ``oldest``."""
    release = numbers(version)
    return release is not None and release < oldest


def _spelled(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
