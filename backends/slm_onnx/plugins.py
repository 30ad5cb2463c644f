"""Execution providers that come as packages of their own: plugins, which ONNX Runtime loads at run time."""

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
        package: its name for pip.
        module: its Python module, which has the path of the library.
        software: the environment variable that offers devices which ONNX Runtime does not recognize as GPUs: software
            devices, and GPUs that are not on a PCI bus.
        since: the release of ONNX Runtime from which Python can allocate the device's memory.
    """

    package: str
    module: str
    software: str
    since: tuple[int, int]

    @property
    def is_installed(self) -> bool:
        """Whether Python can import it; nothing is imported."""
        return importlib.util.find_spec(self.module) is not None


PLUGINS: Mapping[str, Plugin] = MappingProxyType(
    {
        "WebGpuExecutionProvider": Plugin(
            "onnxruntime-ep-webgpu", "onnxruntime_ep_webgpu", "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER", (1, 32)
        )
    }
)
"""The plugins that are known here, by the name of their provider."""


@functools.cache
def register(ort: Any) -> Mapping[str, str]:
    """Hand the installed plugins to the module ``onnxruntime``, once.

    Returns:
        What is wrong with each plugin that could not be loaded, by the name of its provider.
    """
    problems = {}
    for provider, plugin in PLUGINS.items():
        if not plugin.is_installed:
            continue
        try:
            library = importlib.import_module(plugin.module).get_library_path()
            ort.register_execution_provider_library(provider, library)
        except Exception as error:  # an older runtime has no plugins, or a plugin refuses the runtime's version
            problems[provider] = " ".join(str(error).split())[:300]
    return problems


def needs(provider: str, problem: str | None = None) -> str:
    """Advice if ONNX Runtime does not offer a plugin's provider.

    Args:
        provider: its name.
        problem: what ``register`` says of it.
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
