"""A Vulkan device for tests of WebGPU: a GPU, or SwiftShader, which runs in software on any processor."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

import pytest

from slm_core import subprocess_probe
from slm_core.errors import BackendUnavailable

INSTALL = "apt-get install -y --no-install-recommends chromium-common libvulkan1 && pip install 'slm-core[webgpu]'"
_SOFTWARE = Path("/usr/lib/chromium/vk_swiftshader_icd.json")  # the path in Debian's chromium-common
_DRIVER, _OLD_DRIVER = "VK_DRIVER_FILES", "VK_ICD_FILENAMES"
_NOT_AUTOMATIC = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"

# Registered here and not by the backend: if the backend fails to register it, tests must fail instead of skip.
_ASK = """
import onnx, onnxruntime, onnxruntime_ep_webgpu as plugin
from onnx import helper
onnxruntime.set_default_logger_severity(4)
onnxruntime.register_execution_provider_library("webgpu", plugin.get_library_path())
ports = [helper.make_tensor_value_info(name, 1, [4]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Abs", ["x"], ["y"])], "g", ports[:1], ports[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
options = onnxruntime.SessionOptions()
options.add_provider_for_devices([d for d in onnxruntime.get_ep_devices() if d.ep_name == plugin.get_ep_name()], {})
onnxruntime.InferenceSession(model.SerializeToString(), options)
"""


@functools.cache
def missing() -> str | None:
    """The reason why WebGPU cannot be tested here, or None; sets the environment of this process and its children."""
    if importlib.util.find_spec("onnxruntime_ep_webgpu") is None:
        return f"the plugin onnxruntime-ep-webgpu is not installed: {INSTALL}"
    os.environ.setdefault(_NOT_AUTOMATIC, "1")
    if _has_device():
        return None
    if not _SOFTWARE.exists() or {_DRIVER, _OLD_DRIVER} & os.environ.keys():
        return f"no Vulkan device that WebGPU can use: {INSTALL}"
    os.environ[_DRIVER] = os.environ[_OLD_DRIVER] = str(_SOFTWARE)
    return (
        None if _has_device() else f"{_SOFTWARE} is no device that WebGPU can use (is libvulkan1 installed?): {INSTALL}"
    )


def is_software() -> bool:
    """Whether the device that ``missing`` found is SwiftShader."""
    return os.environ.get(_DRIVER) == str(_SOFTWARE)


def require() -> None:
    """Skip the module or the test if there is no Vulkan device."""
    if (reason := missing()) is not None:
        pytest.skip(reason, allow_module_level=True)


def _has_device() -> bool:
    try:
        subprocess_probe.run("WebGPU", _ASK)
    except BackendUnavailable:
        return False
    return True
