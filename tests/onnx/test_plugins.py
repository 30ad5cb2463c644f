"""Execution providers in plugins: their registration, and the errors if one cannot be used."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType

import pytest

from slm_core.errors import BackendUnavailable
from slm_onnx import devices, plugins, providers
from slm_onnx import runtime as onnxruntime

PROVIDER = "WebGpuExecutionProvider"


@pytest.fixture
def plugin(tmp_path, monkeypatch) -> None:
    """A package with the name of the plugin, but without its library."""
    module = ModuleType("onnxruntime_ep_webgpu")
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    module.get_library_path = lambda: str(tmp_path / "lib.so")
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def no_plugin(monkeypatch) -> None:
    monkeypatch.setattr(plugins.Plugin, "is_installed", False)


class FakeRuntime:
    """Replaces the module ``onnxruntime``."""

    def __init__(self, error: str = "") -> None:
        self.error, self.registered = error, []

    def register_execution_provider_library(self, name: str, library: str) -> None:
        self.registered.append((name, library))
        if self.error:
            raise RuntimeError(self.error)


def test_a_plugin_is_registered_once(plugin, tmp_path) -> None:
    ort = FakeRuntime()
    assert (plugins.register(ort), plugins.register(ort)) == ({}, {})
    assert ort.registered == [(PROVIDER, str(tmp_path / "lib.so"))]


def test_a_plugin_that_refuses_the_runtime_is_a_one_line_error(plugin) -> None:
    problems = plugins.register(FakeRuntime('ORT runtime version "1.23"\nis below the minimum'))
    assert plugins.needs(PROVIDER, problems[PROVIDER]) == (
        'onnxruntime-ep-webgpu cannot be loaded: ORT runtime version "1.23" is below the minimum'
    )


def test_without_a_plugin_the_error_names_its_package(no_plugin) -> None:
    ort = FakeRuntime("not to be called")
    assert (plugins.register(ort), ort.registered) == ({}, [])
    assert "pip install 'slm-core[webgpu]'" in plugins.needs(PROVIDER)


def test_without_a_gpu_the_error_names_the_switch_for_software_devices(plugin) -> None:
    assert "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1" in plugins.needs(PROVIDER)


def test_a_build_with_a_built_in_provider_is_refused(no_plugin, monkeypatch) -> None:
    """onnxruntime-webgpu gives Python no access to device memory."""
    monkeypatch.setattr(providers, "installed", lambda: (PROVIDER, "CPUExecutionProvider"))
    with pytest.raises(BackendUnavailable, match=r"slm-core\[webgpu\]"):
        providers.find("webgpu")
    assert devices.choose("auto").label == "cpu"


def test_an_older_runtime_is_refused(plugin, monkeypatch) -> None:
    monkeypatch.setattr(providers, "installed", lambda: (PROVIDER, "CPUExecutionProvider"))
    monkeypatch.setattr(onnxruntime, "version", lambda: "1.31.1")
    with pytest.raises(BackendUnavailable, match=r"needs onnxruntime 1\.32 \(found: 1\.31\.1\)"):
        providers.find("webgpu")
