"""Fixtures of the native engine's tests: every tier, and a function that loads models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slm_core.types import ModelOptions
from slm_native import _extension, torch_devices
from slm_native.backend import NativeBackend
from slm_native.model import NativeModel


@pytest.fixture(params=["reference", "cpu", "torch"])
def tier(request: pytest.FixtureRequest) -> str:
    """Each tier in turn; a tier whose extension is not built is skipped with a message."""
    if request.param == "cpu" and (missing := _extension.why_missing()) is not None:
        pytest.skip(f"the cpu tier is not tested, as the C++ extension is missing: {missing}")
    if request.param == "torch" and (missing := torch_devices.why_missing()) is not None:
        pytest.skip(f"the torch tier is not tested: {missing}")
    return str(request.param)


@pytest.fixture
def load() -> Iterator[Callable[..., NativeModel]]:
    """A function that loads a model; the model is closed at the end of the test."""
    models: list[NativeModel] = []

    def load_model(path: Path, tier: str = "reference", **options: object) -> NativeModel:
        backend_options = {"tier": tier, **options}
        models.append(NativeBackend().load(path, ModelOptions(backend_options=backend_options)))
        return models[-1]

    yield load_model
    for model in models:
        model.close()
