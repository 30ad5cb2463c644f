"""An extension that does not compile is left out of the installation, and the note in its place says why."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import nanobind
import pytest

SOURCES = Path(__file__).resolve().parents[2] / "backends" / "slm_native" / "csrc"
COMPILER = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)

FAILING_COMPILER = f"""#!/bin/sh
case "$*" in
*isa.cpp*)
    echo 'isa.cpp:1:1: fatal error: no "luck" in C:\\Temp; $HOME [today]' >&2
    exit 1 ;;
esac
exec {COMPILER} "$@"
"""

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="the compiler that fails is a shell script"),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake (pip install cmake ninja)"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    compiler = tmp_path / "c++"
    compiler.write_text(FAILING_COMPILER, encoding="utf-8")
    compiler.chmod(0o755)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = {
        "CMAKE_CXX_COMPILER": compiler,
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": nanobind.cmake_dir(),
    }
    _cmake(*generator, "-S", SOURCES, "-B", tmp_path / "build", *(f"-D{key}={value}" for key, value in options.items()))
    return tmp_path / "build"


def _cmake(*arguments: str | Path, succeeds: bool = True) -> str:
    process = subprocess.run(
        ["cmake", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
        timeout=240,
        env={**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": "1"},
    )
    assert (process.returncode == 0) == succeeds, process.stdout[-4000:]
    return process.stdout


def test_a_compile_that_fails_leaves_a_note(configured: Path, tmp_path: Path) -> None:
    _cmake("--build", configured)
    _cmake("--install", configured, "--prefix", tmp_path / "installed")
    files = [file for file in (tmp_path / "installed").rglob("*") if file.is_file()]
    assert [file.name for file in files] == ["_native_missing.py"]
    reason = runpy.run_path(str(files[0]))["REASON"]
    assert reason == ("it did not compile at installation (isa.cpp:1:1: fatal error: no luck in C:Temp HOME today)"), (
        "one line, with the compiler's first error"
    )


def test_a_wheel_is_not_built_without_the_extension(configured: Path, tmp_path: Path) -> None:
    _cmake("-DSLM_REQUIRE_EXTENSION=ON", configured)
    output = _cmake("--install", configured, "--prefix", tmp_path / "installed", succeeds=False)
    assert "is not built: it did not compile" in " ".join(output.split())
    assert not list((tmp_path / "installed").rglob("*.py"))
