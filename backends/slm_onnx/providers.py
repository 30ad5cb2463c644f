"""Execution providers: the provider of each device name, and its options for sessions and tensors."""

from __future__ import annotations

import functools
import math
import mmap
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core import subprocess_probe
from slm_core.errors import BackendUnavailable
from slm_core.types import KvType
from slm_onnx import plugins, runtime

KV_TYPES: Mapping[str, KvType] = {"float32": KvType.F32, "float16": KvType.F16}
"""The KV type of caches of a dtype."""


@dataclass(frozen=True, slots=True)
class Provider:
    """What ONNX Runtime calls a device.

    Attributes:
        name: of the execution provider.
        package: the build of ONNX Runtime that has it.
        untried: the conformance suite has never passed on it.
        memory: the runtime's name for the device's memory; "" if tensors stay in host memory.
        dtype: of activations and of the KV cache.
        config: entries of a session's configuration.
        preloads_cuda: sessions need CUDA's libraries.
        is_numbered: whether a machine may have several such devices, told apart by ``device_id``.
        bias_since: the release of ONNX Runtime from which attention takes a bias there; without one attention is fused.
            None where any release does, and a bias costs no fused kernel.
        by_name_only: why ``device="auto"`` does not take it, although the conformance suite has passed on it; or "".
    """

    name: str
    package: str
    untried: bool = True
    memory: str = ""
    dtype: str = "float32"
    config: Mapping[str, str] = field(default_factory=dict)
    preloads_cuda: bool = False
    is_numbered: bool = False
    bias_since: tuple[int, int] | None = None
    by_name_only: str = ""


_CUDA_BIAS = 1, 29  # microsoft/onnxruntime#29525

# The weight-only products of fp16 activations: MatMulNBits takes them for blocks of 32 weights and more where it can.
_CUDA = MappingProxyType({"ep.cuda.fpa_intb_gemm": "1"})

# A provider is tried when the conformance suite has passed on it: then it is untried=False here, and has a date in
# the table of docs/backends/onnx.md. device="auto" takes no other.
PROVIDERS: Mapping[str, Provider] = MappingProxyType(
    {
        "cuda": Provider(
            "CUDAExecutionProvider",
            "onnxruntime-gpu",
            memory="cuda",
            dtype="float16",
            config=_CUDA,
            preloads_cuda=True,
            is_numbered=True,
            bias_since=_CUDA_BIAS,
        ),
        "tensorrt": Provider(
            "TensorrtExecutionProvider",
            "onnxruntime-gpu",
            memory="cuda",
            dtype="float16",
            preloads_cuda=True,
            is_numbered=True,
            bias_since=_CUDA_BIAS,
        ),
        "rocm": Provider(
            "MIGraphXExecutionProvider", "onnxruntime-migraphx", memory="cuda", dtype="float16", is_numbered=True
        ),
        "directml": Provider("DmlExecutionProvider", "onnxruntime-directml", dtype="float16"),
        "coreml": Provider("CoreMLExecutionProvider", "onnxruntime"),
        "openvino": Provider("OpenVINOExecutionProvider", "onnxruntime-openvino"),
        "webgpu": Provider(
            "WebGpuExecutionProvider",
            "onnxruntime-ep-webgpu",
            untried=False,
            memory="webgpu",
            by_name_only="the suite has passed on a software device only",
        ),
        "cpu": Provider("CPUExecutionProvider", "onnxruntime", untried=False),
    }
)
_CPU = "cpu"
_WANTED = re.compile(r"([a-z]+)(?::([0-9]{1,3}))?")


@dataclass(frozen=True, slots=True)
class Device:
    """Where a model runs.

    Attributes:
        label: its name for users: "cpu", "cuda:0".
        provider: the execution provider.
        device_id: which of several.
        reason: why this one.
    """

    label: str
    provider: Provider
    device_id: int
    reason: str

    @property
    def on_host(self) -> bool:
        """Whether the KV cache is in host memory."""
        return not self.provider.memory

    @property
    def is_cpu(self) -> bool:
        """Whether it is the CPU, which has operators that others lack."""
        return self.provider.name == PROVIDERS[_CPU].name

    @property
    def kv_types(self) -> tuple[KvType, ...]:
        """What keys and values can be kept as, the default first."""
        default = KV_TYPES[self.provider.dtype]
        return (default, KvType.Q8_0) if self.is_cpu else (default,)

    def place(self, array: NDArray[Any]) -> Any:
        """An ``OrtValue`` with an array's values; on the host it shares the array's memory."""
        ort_value = runtime.load().OrtValue
        if self.on_host:
            return ort_value.ortvalue_from_numpy(array)
        return ort_value.ortvalue_from_numpy(array, self.provider.memory, self.device_id)

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """An ``OrtValue`` in the device's own memory, its content undefined.

        WebGPU reports a refused allocation when the memory is first used, not here.

        Raises:
            MemoryError: more than the device gives.
        """
        try:
            return runtime.load().OrtValue.ortvalue_from_shape_and_type(
                list(shape), dtype.type, self.provider.memory, self.device_id
            )
        except RuntimeError as error:
            raise MemoryError(runtime.one_line(error)) from error

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """An ``OrtValue`` of zeros.

        On the host it takes memory as it is written, in ordinary pages. NumPy would ask for huge ones: the cells of a
        head, a layer and a plane lie apart from all others, so that the first token had the whole of a cache cleared.

        Raises:
            MemoryError: more than the system gives.
        """
        n = math.prod(shape)
        n_bytes = max(1, n * dtype.itemsize)  # nothing cannot be mapped
        try:
            if sys.platform == "win32":
                memory = mmap.mmap(-1, n_bytes)
            else:
                memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:  # the latter: more than an address can count
            raise MemoryError(f"{n_bytes} bytes") from error
        return self.place(np.frombuffer(memory, dtype, n).reshape(shape))

    def session_place(self, options: Mapping[str, str], threads: runtime.Threads) -> runtime.Place:
        """Where its sessions run: on this provider, and on the CPU for operators that it lacks.

        Args:
            options: of the provider.
            threads: for operators on the CPU.
        """
        provider = self.provider
        if self.is_cpu:
            return runtime.Place([(provider.name, options)], threads, provider.config)
        numbered = {"device_id": str(self.device_id)} if provider.is_numbered else {}
        order = [(provider.name, {**numbered, **options}), (PROVIDERS[_CPU].name, {})]
        return runtime.Place(order, threads, provider.config, provider.preloads_cuda)


@functools.cache
def installed() -> tuple[str, ...]:
    """The execution providers of this build of ONNX Runtime.

    Where it is not imported yet, a process of its own is asked: it may not load.

    Raises:
        BackendUnavailable: it is not installed, or its library does not load.
    """
    if (reason := runtime.missing()) is not None:
        raise BackendUnavailable(reason)
    if runtime.is_loaded():
        return tuple(runtime.load().get_available_providers())
    code = "from slm_onnx import runtime; print(*runtime.load().get_available_providers())"
    return tuple(subprocess_probe.run("ONNX Runtime", code).split())


def find(wanted: str) -> Device:
    """The device of that name.

    Raises:
        BackendUnavailable: no such device, or this build of ONNX Runtime lacks it.
    """
    match = _WANTED.fullmatch(wanted)
    provider = PROVIDERS.get(match[1]) if match else None
    if match is None or provider is None:
        raise BackendUnavailable(f"unknown device {wanted!r} (accepted: auto, {', '.join(PROVIDERS)}, or cuda:1)")
    if not _is_there(provider, installed()):
        raise BackendUnavailable(f"device {wanted!r} needs {provider.name}: {_missing(provider)}")
    number = int(match[2] or 0)
    if number and not provider.is_numbered:
        raise BackendUnavailable(f"device {wanted!r}: there is one {match[1]!r} (accepted: {match[1]})")
    return Device(f"{match[1]}:{number}" if provider.is_numbered else match[1], provider, number, "asked for")


def _is_there(provider: Provider, present: Sequence[str]) -> bool:
    """Whether ONNX Runtime has a provider. A plugin has to come as one: built in, it gives Python no memory."""
    plugin = plugins.PLUGINS.get(provider.name)
    return provider.name in present and (plugin is None or (plugin.is_installed and runtime.is_since(plugin.since)))


def _missing(provider: Provider) -> str:
    """Why a provider is not there."""
    if provider.name in plugins.PLUGINS:
        problems = plugins.register(runtime.load()) if runtime.is_loaded() else {}
        since = plugins.PLUGINS[provider.name].since
        old = (
            None
            if runtime.is_since(since)
            else f"it needs onnxruntime {since[0]}.{since[1]} (found: {runtime.version()})"
        )
        return plugins.needs(provider.name, old or problems.get(provider.name))
    return f"this build of ONNX Runtime lacks it (it comes with {provider.package}; uninstall other builds first)"
