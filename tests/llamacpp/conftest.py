"""Fixtures of the llama.cpp tests: models on one thread, and a temporary cache folder for results of the probe."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slm_conformance.oracle.factories import tiny_model
from slm_core.protocols import BackendModel
from slm_core.types import ModelOptions
from slm_llamacpp.backend import LlamaCppBackend
from slm_llamacpp.context import LlamaCppContext

LoadModel = Callable[..., BackendModel]


@pytest.fixture(scope="session", autouse=True)
def llama_cpp() -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed: pip install 'slm-core[llamacpp]'")


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLM_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def llama_file(model_dir: Path) -> Path:
    return tiny_model(model_dir, "llama", "f32")


@pytest.fixture(scope="session")
def qwen2_file(model_dir: Path) -> Path:
    return tiny_model(model_dir, "qwen2", "f32")


@pytest.fixture
def no_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a sequence is decoded again because llama.cpp and the ledger differ: it would hide the tested bugs."""

    def fail(_context: LlamaCppContext, seq_id: int) -> None:
        pytest.fail(f"llama.cpp and the ledger differ in sequence {seq_id}")

    monkeypatch.setattr(LlamaCppContext, "_rebuild", fail)


@pytest.fixture
def load() -> Iterator[LoadModel]:
    """``load(path, **options)``: a model on one thread, closed when the test ends."""
    models: list[BackendModel] = []

    def load_model(path: Path, **backend_options: object) -> BackendModel:
        models.append(LlamaCppBackend().load(path, ModelOptions(n_threads=1, backend_options=backend_options)))
        return models[-1]

    yield load_model
    for model in models:
        model.close()
