"""Checks the C++: its format by clang-format, and bugs by clang-tidy (`.clang-format`, `.clang-tidy`).

clang-tidy checks only plain C++: kernels (`*.inc`) are the same for all instruction sets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanobind

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("backends/slm_native/csrc")
FORMATTED = ("backends/slm_native/csrc", "tests/fuzz/cpp", "tools")
SUFFIXES = (".h", ".inc", ".cpp")
ISAS = ("avx2", "avx_vnni", "avx512", "avx512_bf16", "amx", "amx_plain", "neon", "neon_i8mm")


def run(program: str, *arguments: str | Path) -> bool:
    """Whether a program in this Python's folder succeeds; prints its output if it fails."""
    path = Path(sys.executable).with_name(program)
    process = subprocess.run([path, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if process.returncode:
        print(process.stdout + process.stderr, file=sys.stderr)
    return process.returncode == 0


def formatted() -> bool:
    files = (path for folder in FORMATTED for path in (ROOT / folder).rglob("*"))
    return run("clang-format", "--dry-run", "-Werror", *sorted(path for path in files if path.suffix in SUFFIXES))


def tidy(path: Path) -> bool:
    system = [nanobind.include_dir(), sysconfig.get_path("include")]
    flags = ["-std=c++20", f"-I{SOURCE}", '-DSLM_INTERFACE=""', *(f"-isystem{folder}" for folder in system)]
    shallow = ["-Xclang", "-analyzer-config", "-Xclang", "mode=shallow"]  # takes a sixth of the time
    return run("clang-tidy", "--quiet", path, "--", *flags, *shallow)


def main() -> int:
    if not formatted():
        return 1
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        print("WARNING: clang-tidy is left out: it needs a C++ compiler's standard library", file=sys.stderr)
        return 0
    files = sorted(path.relative_to(ROOT) for path in (ROOT / SOURCE).rglob("*.cpp"))
    files = [path for path in files if not path.stem.endswith(ISAS)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return 0 if all(list(pool.map(tidy, files))) else 1


if __name__ == "__main__":
    sys.exit(main())
