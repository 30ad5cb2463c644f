"""Which build of ONNX Runtime there is, and that one that is too old is refused in one line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from slm_conformance.oracle.families import family_model
from slm_core.errors import BackendUnavailable
from slm_core.types import ModelOptions
from slm_onnx import build, providers, runtime
from slm_onnx.backend import OnnxBackend

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch):
    """Puts another build of ONNX Runtime in the place of the one that is installed."""
    pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")

    def put(package: str, version: str) -> None:
        providers.installed.cache_clear()
        monkeypatch.setattr(build, "find_build", lambda: build.Build(package, version, Path()))

    yield put
    providers.installed.cache_clear()


def test_the_installed_build_is_the_one_that_is_imported() -> None:
    module = pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")
    found = build.find_build()
    assert found is not None
    assert (found.version, found.package) == (module.__version__, module.package_name)
    assert any("onnxruntime" in line for line in found.stamp()), found.stamp()
    assert runtime.version() == module.__version__


def test_the_oldest_versions_are_those_of_the_package() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["onnx"]
    bounds = {name: build.numbers(version) for name, version in (line.split(">=") for line in extra)}
    assert bounds == {"onnx": build.OLDEST_ONNX, "onnxruntime": build.OLDEST}


def test_a_runtime_that_is_too_old_is_refused_in_one_line(installed, tmp_path) -> None:
    installed("onnxruntime-openvino", "1.24.1")
    reason = r"onnxruntime-openvino 1\.24\.1 is too old: it lacks the operator TensorScatter.*1\.25 or later"
    status = OnnxBackend().status()
    assert (status.installed, bool(re.search(reason, status.reason))) == (False, True)
    path = family_model(tmp_path, "qwen3")
    assert re.search(reason, OnnxBackend().supports(path).reason)
    with pytest.raises(BackendUnavailable, match=reason):
        OnnxBackend().load(path, ModelOptions("cpu"))


@pytest.mark.parametrize("version", ["1.25.0", "1.30.0.dev20260101", "2.0", ""])
def test_others_are_not(installed, version) -> None:
    """A version that nobody tells may be any."""
    installed("onnxruntime", version)
    assert build.problem() is None


def test_an_onnx_that_is_too_old_is_refused(installed, monkeypatch) -> None:
    monkeypatch.setattr(build, "_onnx_version", lambda: "1.16.2")
    assert build.problem() == "onnx 1.16.2 is too old (needed: 1.17 or later)"


def test_experts_in_codes_need_a_newer_runtime(installed, tmp_path) -> None:
    from slm_core.quantizing import quantize_model

    source, target = family_model(tmp_path, "mixtral"), tmp_path / "coded.gguf"
    quantize_model(source, target, "Q8_0", force=True, pure=True)
    for version, runs in (("1.30.0", False), ("1.31.0", True)):
        installed("onnxruntime", version)
        support = OnnxBackend().supports(target)
        assert (support.supported, "1.31 or later" in support.reason) == (runs, not runs)
        assert OnnxBackend().supports(source).supported, "in floats they are MoE's"
