"""Fixtures of the tests of quantization."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from toy_models import Toy, importance_for, write_imatrix


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a toy model with the given fields."""
    return lambda name="toy.gguf", **fields: Toy(**fields).write(tmp_path / name)


@pytest.fixture
def imatrix_of(tmp_path: Path) -> Callable[[Path], tuple[dict[str, NDArray[np.float32]], Path]]:
    """A function that makes a random importance matrix for a model, and a file with it."""

    def make(path: Path) -> tuple[dict[str, NDArray[np.float32]], Path]:
        importance = importance_for(path)
        return importance, write_imatrix(tmp_path / "imatrix.gguf", importance)

    return make
