"""Plugins with execution providers: what is registered, and what a user is told where one cannot be used."""

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
    """A package of the plugin's name whose library is nowhere."""
    module = ModuleType("onnxruntime_ep_webgpu")
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    module.get_library_path = lambda: str(tmp_path / "lib.so")
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def no_plugin(monkeypatch) -> None:
    monkeypatch.setattr(plugins.Plugin, "is_installed", False)


class Runtime:
    """Stands in for the module ``onnxruntime``."""

    def __init__(self, error: str = "") -> None:
        self.error, self.registered = error, []

    def register_execution_provider_library(self, name: str, library: str) -> None:
        self.registered.append((name, library))
        if self.error:
            raise RuntimeError(self.error)


def test_a_plugin_is_registered_once(plugin, tmp_path) -> None:
    ort = Runtime()
    assert (plugins.register(ort), plugins.register(ort)) == ({}, {})
    assert ort.registered == [(PROVIDER, str(tmp_path / "lib.so"))]


def test_a_plugin_that_refuses_the_runtime_says_why_in_one_line(plugin) -> None:
    problems = plugins.register(Runtime('ORT runtime version "1.23"\nis below the minimum'))
    assert plugins.needs(PROVIDER, problems[PROVIDER]) == (
        'onnxruntime-ep-webgpu cannot be loaded: ORT runtime version "1.23" is below the minimum'
    )


def test_without_a_plugin_nothing_is_registered_and_its_package_is_named(no_plugin) -> None:
    ort = Runtime("not to be called")
    assert (plugins.register(ort), ort.registered) == ({}, [])
    assert "pip install 'slm-core[webgpu]'" in plugins.needs(PROVIDER)


def test_without_a_gpu_the_switch_for_other_devices_is_named(plugin) -> None:
    assert "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1" in plugins.needs(PROVIDER)


def test_a_build_that_has_the_provider_itself_is_refused(no_plugin, monkeypatch) -> None:
    """onnxruntime-webgpu: it gives Python no memory of the device."""
    monkeypatch.setattr(providers, "installed", lambda: (PROVIDER, "CPUExecutionProvider"))
    with pytest.raises(BackendUnavailable, match=r"slm-core\[webgpu\]"):
        providers.find("webgpu")
    assert devices.choose("auto").label == "cpu"


def test_an_older_runtime_is_refused(plugin, monkeypatch) -> None:
    monkeypatch.setattr(providers, "installed", lambda: (PROVIDER, "CPUExecutionProvider"))
    monkeypatch.setattr(onnxruntime, "version", lambda: "1.31.1")
    with pytest.raises(BackendUnavailable, match=r"needs onnxruntime 1\.32 \(found: 1\.31\.1\)"):
        providers.find("webgpu")
