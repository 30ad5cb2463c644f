"""Execution providers in packages of their own: plugins that ONNX Runtime loads at run time."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Plugin:
    """A package with an execution provider.

    Attributes:
        package: its name on PyPI.
        module: its Python module, which knows the path of the library.
        software: the environment variable that enables devices which ONNX Runtime does not recognize as GPUs: software
            devices, and GPUs that are not on a PCI bus.
        since: the first release of ONNX Runtime whose Python API can allocate the device's memory.
    """

    package: str
    module: str
    software: str
    since: tuple[int, int]

    @property
    def is_installed(self) -> bool:
        """Whether the module can be imported; imports nothing."""
        return importlib.util.find_spec(self.module) is not None


PLUGINS: Mapping[str, Plugin] = MappingProxyType(
    {
        "WebGpuExecutionProvider": Plugin(
            "onnxruntime-ep-webgpu", "onnxruntime_ep_webgpu", "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER", (1, 32)
        )
    }
)
"""The known plugins, by the name of their provider."""


@functools.cache
def register(ort: Any) -> Mapping[str, str]:
    """Register the installed plugins with the module ``onnxruntime``, once.

    Returns:
        The errors of plugins that could not be loaded, by the name of their provider.
    """
    problems = {}
    for provider, plugin in PLUGINS.items():
        if not plugin.is_installed:
            continue
        try:
            library = importlib.import_module(plugin.module).get_library_path()
            ort.register_execution_provider_library(provider, library)
        except Exception as error:  # an older ONNX Runtime without plugins, or a plugin that refuses its version
            problems[provider] = " ".join(str(error).split())[:300]
    return problems


def needs(provider: str, problem: str | None = None) -> str:
    """What to install if ONNX Runtime does not offer a plugin's provider.

    Args:
        provider: name of the provider.
        problem: the error from ``register``, if any.
    """
    plugin = PLUGINS[provider]
    if not plugin.is_installed:
        return f"it comes with {plugin.package}, beside onnxruntime: pip install 'slm-core[webgpu]'"
    if problem is not None:
        return f"{plugin.package} cannot be loaded: {problem}"
    return (
        f"ONNX Runtime finds no GPU for {plugin.package}; {plugin.software}=1 in the environment lets it use any device"
        " that Vulkan has"
    )


def versions() -> list[str]:
    """The installed plugins and their versions."""
    versions = []
    for plugin in PLUGINS.values():
        try:
            versions.append(f"{plugin.package} {importlib.metadata.version(plugin.package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
