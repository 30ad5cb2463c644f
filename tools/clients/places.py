"""Environments and sources of clients, kept in build/clients."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build" / "clients"


def environment(name: str, needed: Sequence[str]) -> Path:
    """The interpreter of a virtual environment with these packages; it is made if it is missing."""
    folder = BUILD / name
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qq", *needed]
        subprocess.run(pip, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        (folder / "complete").touch()
    return python


def source(package: str, version: str, python: Path) -> Path:
    """The unpacked source distribution of a package; it is downloaded if it is missing."""
    stem = f"{package.replace('-', '_')}-{version}"
    if not (BUILD / stem).exists():
        pip = [python, "-m", "pip", "download", "-qq", "--no-deps", "--no-binary", package]
        subprocess.run([*pip, "-d", BUILD, f"{package}=={version}"], check=True)
        with tarfile.open(BUILD / f"{stem}.tar.gz") as archive:
            archive.extractall(BUILD, filter="data")
    return BUILD / stem
