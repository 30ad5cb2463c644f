"""Fixtures of the ONNX Runtime backend's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from slm_core.types import ModelOptions
from slm_onnx.backend import OnnxBackend

if TYPE_CHECKING:
    from slm_onnx.model import OnnxModel


@pytest.fixture
def load() -> Iterator[Callable[..., OnnxModel]]:
    """A function that loads a model on one thread; the model is closed at the end of the test."""
    pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")
    models: list[OnnxModel] = []

    def load_model(path: Path, device: str = "cpu", **options: object) -> OnnxModel:
        models.append(OnnxBackend().load(path, ModelOptions(device, 1, backend_options=options)))
        return models[-1]

    yield load_model
    for model in models:
        model.close()
