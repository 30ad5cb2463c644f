"""Tests that need an NVIDIA GPU; without one they are skipped with a message."""

from __future__ import annotations

import os

import pytest

HOW = "run benchmarks/gpu_check.sh on a machine with an NVIDIA GPU"


@pytest.fixture(autouse=True, scope="package")
def gpu() -> None:
    torch = pytest.importorskip("torch", reason=f"torch is not installed: {HOW}")
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} finds no CUDA device: {HOW}")
    if os.environ.get("TRITON_INTERPRET") != "0":
        pytest.skip(f"Triton's interpreter is on (TRITON_INTERPRET is not 0): {HOW}")
