"""The installed build of ONNX Runtime; a build that is too old is refused in one line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from slm_conformance.oracle.families import family_model
from slm_core.errors import BackendUnavailable
from slm_core.types import ContextOptions, KvType, ModelOptions, Pos
from slm_onnx import build, providers, runtime
from slm_onnx.backend import OnnxBackend

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch):
    """A function that replaces the installed build of ONNX Runtime."""
    pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")

    def replace_build(package: str, version: str) -> None:
        providers.installed.cache_clear()
        monkeypatch.setattr(build, "find_build", lambda: build.Build(package, version, Path()))

    yield replace_build
    providers.installed.cache_clear()


def test_the_installed_build_is_the_imported_one() -> None:
    module = pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")
    installed_build = build.find_build()
    assert installed_build is not None
    assert (installed_build.version, installed_build.package) == (module.__version__, module.package_name)
    assert any("onnxruntime" in line for line in installed_build.stamp()), installed_build.stamp()
    assert runtime.version() == module.__version__


def test_the_oldest_versions_equal_those_in_pyproject() -> None:
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
def test_newer_and_unknown_versions_are_accepted(installed, version) -> None:
    """An unknown version is accepted."""
    installed("onnxruntime", version)
    assert build.problem() is None


def test_an_onnx_that_is_too_old_is_refused(installed, monkeypatch) -> None:
    monkeypatch.setattr(build, "_onnx_version", lambda: "1.16.2")
    assert build.problem() == "onnx 1.16.2 is too old (needed: 1.17 or later)"


def test_quantized_experts_need_a_newer_runtime(installed, tmp_path) -> None:
    from slm_core.quantizing import quantize_model

    source, target = family_model(tmp_path, "mixtral"), tmp_path / "coded.gguf"
    quantize_model(source, target, "Q8_0", force=True, pure=True)
    for version, runs in (("1.30.0", False), ("1.31.0", True)):
        installed("onnxruntime", version)
        support = OnnxBackend().supports(target)
        assert (support.supported, "1.31 or later" in support.reason) == (runs, not runs)
        assert OnnxBackend().supports(source).supported, "the MoE operator supports float experts"


def test_the_packages_are_checked_when_a_model_is_loaded_and_not_in_each_call(monkeypatch, tmp_path) -> None:
    """The check reads metadata of packages for a millisecond, which is as long as a small model decodes."""
    pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")
    with OnnxBackend().load(family_model(tmp_path, "qwen3"), ModelOptions("cpu")) as model:
        checks: list[int] = []
        monkeypatch.setattr(build, "problem", lambda: checks.append(1))
        with model.new_context(ContextOptions(32, 1, 8, KvType.F32, KvType.F32)) as context:
            batch = context.new_batch()
            batch.extend([1, 2, 3], Pos(0, 0))
            context.decode(batch)
        assert checks == []
