"""The packages to mutate, and the tests of each: for the table, and for the sessions of pytest."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
Kind = Literal["suite", "unit"]
SUITES = Path(__file__).parent / "suites"


@dataclass(frozen=True, slots=True)
class Package:
    """A row of the table.

    Attributes:
        name: name of the row.
        files: patterns of its files, relative to the repository.
        suites: modules of ``suites/`` that adopt the conformance suite and reach the package.
        unit: its unit tests, relative to the repository.
    """

    name: str
    files: tuple[str, ...]
    suites: tuple[str, ...]
    unit: tuple[str, ...]

    def paths(self) -> Iterator[Path]:
        """Its files."""
        for pattern in self.files:
            yield from sorted(ROOT.glob(pattern))

    def tests(self, kind: Kind) -> list[Path]:
        """The files of its tests."""
        return self.suite_paths() if kind == "suite" else self.unit_paths()

    def suite_paths(self) -> list[Path]:
        """The adopting modules."""
        return [SUITES / f"{name}.py" for name in self.suites]

    def unit_paths(self) -> list[Path]:
        """The unit tests' files, including files in folders."""
        files: list[Path] = []
        for name in self.unit:
            path = ROOT / name
            files += [path] if path.suffix == ".py" else sorted(path.rglob("test_*.py"))
        return files


def _each(pattern: str, names: str) -> tuple[str, ...]:
    return tuple(pattern.format(name) for name in names.split())


_HOST = ("native", "native_states", "toy_replay")

PACKAGES = (
    Package(
        "contexts (`slm_core.context`)",
        ("slm_core/container.py", "slm_core/context/*.py"),
        ("native", "native_states", "llamacpp"),
        ("tests/context",),
    ),
    Package(
        "KV cache (`slm_native.kv`)",
        _each("backends/slm_native/kv/{}.py", "__init__ cache codecs plan store stores tables"),
        ("native", "native_states", "native_windows"),
        _each("tests/native/test_{}.py", "kv_cache kv_plan edits window_cache"),
    ),
    Package(
        "windows (`slm_native.kv`)",
        ("backends/slm_native/kv/window.py",),
        ("native_windows",),
        _each("tests/native/test_{}.py", "window_cache windows"),
    ),
    Package(
        "contexts (`slm_llamacpp`)",
        _each(
            "backends/slm_llamacpp/{}.py",
            "batchbuffers bidirectional_blocks context encoder memory mrope_context payload shifts temporal_patches",
        ),
        ("llamacpp",),
        _each(
            "tests/llamacpp/test_{}.py",
            "batchbuffers bidirectional_blocks edits encoders failures lifecycle mrope_positions payload positions"
            " shifts windowed",
        ),
    ),
    Package(
        "contexts (`slm_onnx`)",
        _each("backends/slm_onnx/{}.py", "cells context feeding kvstore positions rows"),
        ("onnx", "onnx_directory"),
        _each(
            "tests/onnx/test_{}.py",
            "backend buckets cells cuts bidirectional_blocks directories logits mrope_positions splitting",
        ),
    ),
    Package("chats (`slm_core.chat`)", ("slm_core/chat/*.py",), _HOST, ("tests/chat",)),
    Package("generation (`slm_core.generation`)", ("slm_core/generation/**/*.py",), _HOST, ("tests/generation",)),
    Package("sampling (`slm_core.sampling`)", ("slm_core/sampling/*.py",), _HOST, ("tests/sampling",)),
    Package("engine (`slm_core.engine`)", ("slm_core/engine/*.py",), (), ("tests/engine",)),
    Package("formatters (`slm_formatters`)", ("formatters/slm_formatters/**/*.py",), _HOST, ("tests/formatters",)),
)


def package_of(path: str) -> Package:
    """The package of a file, which is relative to the repository."""
    return _by_path()[path]


@functools.cache
def _by_path() -> dict[str, Package]:
    return {path.relative_to(ROOT).as_posix(): package for package in PACKAGES for path in package.paths()}
