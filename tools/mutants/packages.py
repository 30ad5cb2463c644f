"""What is mutated, and which tests are asked: packages for the table, sessions of pytest for the work."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUITES = Path(__file__).parent / "suites"


@dataclass(frozen=True, slots=True)
class Package:
    """A row of the table.

    Attributes:
        name: of the row.
        files: patterns of its files, relative to the repository.
        suites: modules of ``suites/`` that adopt the conformance suite and reach it.
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

    def suite_paths(self) -> list[Path]:
        """The adopting modules."""
        return [SUITES / f"{name}.py" for name in self.suites]

    def unit_paths(self) -> list[Path]:
        """The unit tests' files, those of folders included."""
        found: list[Path] = []
        for name in self.unit:
            path = ROOT / name
            found += [path] if path.suffix == ".py" else sorted(path.rglob("test_*.py"))
        return found


_HOST = ("native", "native_states", "toy_replay")
_CONTEXT = ("contextbase", "ledger", "places", "batch", "inputs", "snapshot")

PACKAGES = (
    Package(
        "contexts (`slm_core`)",
        tuple(f"slm_core/{name}.py" for name in _CONTEXT),
        (*_HOST, "llamacpp"),
        tuple(f"tests/core/test_{name}.py" for name in _CONTEXT),
    ),
    Package(
        "KV cache (`slm_native.kv`)",
        ("backends/slm_native/kv/*.py",),
        ("native", "native_states", "native_windows"),
        ("tests/native/test_kv_cache.py", "tests/native/test_edits.py", "tests/native/test_windows.py"),
    ),
    Package(
        "contexts (`slm_llamacpp`)",
        tuple(f"backends/slm_llamacpp/{name}.py" for name in ("batchbuffers", "context", "encoder", "framed", "frames"))
        + tuple(f"backends/slm_llamacpp/{name}.py" for name in ("memory", "payload", "shifts", "spans")),
        ("llamacpp",),
        tuple(f"tests/llamacpp/test_{name}.py" for name in ("edits", "encoders", "failures", "frames", "lifecycle"))
        + tuple(f"tests/llamacpp/test_{name}.py" for name in ("payload", "positions", "spans", "windowed")),
    ),
    Package(
        "contexts (`slm_onnx`)",
        tuple(f"backends/slm_onnx/{name}.py" for name in ("cells", "context", "feeding", "kvstore", "positions", "rows")),
        ("onnx",),
        tuple(f"tests/onnx/test_{name}.py" for name in ("backend", "buckets", "cells", "cuts", "grid_positions"))
        + ("tests/onnx/test_logits.py", "tests/onnx/test_spans.py"),
    ),
    Package("chats (`slm_core.chat`)", ("slm_core/chat/*.py",), _HOST, ("tests/chat",)),
    Package("generation (`slm_core.generation`)", ("slm_core/generation/**/*.py",), _HOST, ("tests/generation",)),
    Package("sampling (`slm_core.sampling`)", ("slm_core/sampling/*.py",), _HOST, ("tests/sampling",)),
    Package("formatters (`slm_formatters`)", ("formatters/slm_formatters/**/*.py",), _HOST, ("tests/formatters",)),
)


def package_of(path: str) -> Package:
    """The package of a file, which is relative to the repository."""
    return _by_path()[path]


@functools.cache
def _by_path() -> dict[str, Package]:
    return {path.relative_to(ROOT).as_posix(): package for package in PACKAGES for path in package.paths()}
