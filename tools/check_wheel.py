"""Checks the files of the installed slm-core: files that a wheel needs, and files that it must not contain.

usage: python tools/check_wheel.py
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.metadata import distribution

PACKAGES = ("slm_core", "slm_native", "slm_llamacpp", "slm_onnx", "slm_formatters", "slm_conformance")
DATA = ("slm_core/data/demo.gguf", "slm_core/data/demo-adapter.gguf")
NEEDED = (*(f"{package}/py.typed" for package in PACKAGES), "slm_native/_native.pyi", *DATA)
UNWANTED = ("slm_native/csrc/", "tests/", "tools/", "benchmarks/")


def faults_of_files(names: Collection[str]) -> list[str]:
    """The faults of a wheel with these files: missing files, and files that do not belong there."""
    missing = [f"{name} is missing" for name in NEEDED if name not in names]
    if not any(name.startswith("slm_native/_native.") and name.endswith((".so", ".pyd")) for name in names):
        missing.append("the C++ extension is missing")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        missing.append("the license is missing")
    return missing + [f"{name} is too much" for name in sorted(names) if name.startswith(UNWANTED)]


def main() -> None:
    """Print each fault; exit with 1 if there is one."""
    installed = distribution("slm-core")
    faults = faults_of_files({str(file.as_posix()) for file in installed.files or ()})
    if installed.metadata["License-Expression"] != "Apache-2.0":
        faults.append("the license is not declared as an SPDX expression")
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__":
    main()
