"""A tiny model, which adapters are loaded for."""

from __future__ import annotations

from pathlib import Path

import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_conformance.oracle.weights import Weights
from slm_core.adapters import BaseModel
from slm_core.gguf import GgufFile


@pytest.fixture
def tiny(tmp_path) -> tuple[Path, Weights]:
    model = make_tiny_model("llama", "f32")
    return model.write(tmp_path / "tiny.gguf"), Weights.of(model)


@pytest.fixture
def base(tiny) -> BaseModel:
    with GgufFile.open(tiny[0]) as file:
        return BaseModel.of(file)
