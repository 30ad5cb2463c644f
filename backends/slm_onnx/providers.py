"""Execution providers: their names as devices, and their options for sessions and tensors."""

from __future__ import annotations

import functools
import math
import mmap
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
"""The KV type of each dtype of caches."""


@dataclass(frozen=True, slots=True)
class Provider:
    """An execution provider, which users see as a device.

    Attributes:
        name: name of the execution provider.
        package: the build of ONNX Runtime that includes it.
        untried: whether the conformance suite has never passed on it.
        memory: ONNX Runtime's name for the device's memory; "" for host memory.
        dtype: dtype of activations and of the KV cache.
        config: entries of the session configuration.
        preloads_cuda: whether sessions need CUDA's libraries.
        is_numbered: whether a machine may have several of them, with a ``device_id`` each.
        bias_since: the first release of ONNX Runtime whose attention supports a bias there; attention without a bias is
            fused. None if every release supports it, at no loss of a fused kernel.
        by_name_only: why ``device="auto"`` does not choose it although the conformance suite has passed on it; or "".
        lock: held while the device works, if the process would crash when two threads use it at the same time.
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
    lock: AbstractContextManager[object] = field(default_factory=nullcontext)


_CUDA_BIAS = 1, 29  # microsoft/onnxruntime#29525

# Weight-only products with fp16 activations: MatMulNBits uses them for blocks of at least 32 weights if it can.
_CUDA = MappingProxyType({"ep.cuda.fpa_intb_gemm": "1"})

# A provider with untried=False has passed the conformance suite, and has a date in the table of docs/backends/onnx.md.
# device="auto" chooses no other.
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
            lock=threading.RLock(),  # microsoft/onnxruntime#32561: also runs of different sessions crash the process
        ),
        "cpu": Provider("CPUExecutionProvider", "onnxruntime", untried=False),
    }
)
_CPU = "cpu"
_WANTED = re.compile(r"([a-z]+)(?::([0-9]{1,3}))?")


@dataclass(frozen=True, slots=True)
class Device:
    """The device of a model.

    Attributes:
        label: its name for users: "cpu", "cuda:0".
        provider: the execution provider.
        device_id: index among several devices of the provider.
        reason: why it was chosen.
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
        """Whether it is the CPU, which has operators that other providers lack."""
        return self.provider.name == PROVIDERS[_CPU].name

    @property
    def kv_types(self) -> tuple[KvType, ...]:
        """The supported KV types, the default first."""
        default = KV_TYPES[self.provider.dtype]
        return (default, KvType.Q8_0) if self.is_cpu else (default,)

    def place(self, array: NDArray[Any]) -> Any:
        """An ``OrtValue`` of an array; on the host it shares the array's memory."""
        ort_value = runtime.module().OrtValue
        if self.on_host:
            return ort_value.ortvalue_from_numpy(array)
        return ort_value.ortvalue_from_numpy(array, self.provider.memory, self.device_id)

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """An uninitialized ``OrtValue`` in the device's memory.

        WebGPU reports a refused allocation when the memory is first used, not here.

        Raises:
            MemoryError: the device refuses to allocate the memory.
        """
        try:
            return runtime.module().OrtValue.ortvalue_from_shape_and_type(
                list(shape), dtype.type, self.provider.memory, self.device_id
            )
        except RuntimeError as error:
            raise MemoryError(runtime.one_line(error)) from error

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """An ``OrtValue`` of zeros.

        On the host, memory is allocated as it is written, in small pages. NumPy would use huge pages: as each head of
        each layer and plane is a separate region, the first token would then clear the whole cache.

        Raises:
            MemoryError: the system refuses to allocate the memory.
        """
        n = math.prod(shape)
        n_bytes = max(1, n * dtype.itemsize)  # 0 bytes cannot be mapped
        try:
            if sys.platform == "win32":
                memory = mmap.mmap(-1, n_bytes)
            else:
                memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:  # ValueError and OverflowError: beyond the address space
            raise MemoryError(f"{n_bytes} bytes") from error
        return self.place(np.frombuffer(memory, dtype, n).reshape(shape))

    def session_place(self, options: Mapping[str, str], threads: runtime.Threads) -> runtime.Place:
        """The execution provider of its sessions, with the CPU for operators that it lacks.

        Args:
            options: options of the provider.
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

    A subprocess lists them, unless ONNX Runtime is already imported: its library may crash or fail to load.

    Raises:
        BackendUnavailable: it is not installed, or its library cannot be loaded.
    """
    if (reason := runtime.missing()) is not None:
        raise BackendUnavailable(reason)
    if runtime.is_loaded():
        return tuple(runtime.load().get_available_providers())
    code = "from slm_onnx import runtime; print(*runtime.load().get_available_providers())"
    return tuple(subprocess_probe.run("ONNX Runtime", code).split())


def find(wanted: str) -> Device:
    """The device with a name.

    Raises:
        BackendUnavailable: no such device, or this build of ONNX Runtime lacks it.
    """
    match = _WANTED.fullmatch(wanted)
    provider = PROVIDERS.get(match[1]) if match else None
    if match is None or provider is None:
        raise BackendUnavailable(f"unknown device {wanted!r} (accepted: auto, {', '.join(PROVIDERS)}, or cuda:1)")
    if not _is_usable(provider, installed()):
        raise BackendUnavailable(f"device {wanted!r} needs {provider.name}: {_missing(provider)}")
    number = int(match[2] or 0)
    if number and not provider.is_numbered:
        raise BackendUnavailable(f"device {wanted!r}: there is one {match[1]!r} (accepted: {match[1]})")
    return Device(f"{match[1]}:{number}" if provider.is_numbered else match[1], provider, number, "asked for")


def _is_usable(provider: Provider, present: Sequence[str]) -> bool:
    """Whether ONNX Runtime has a provider. A plugin that is built in does not count: Python cannot use its memory."""
    plugin = plugins.PLUGINS.get(provider.name)
    return provider.name in present and (plugin is None or (plugin.is_installed and runtime.is_since(plugin.since)))


def _missing(provider: Provider) -> str:
    """Why a provider is missing."""
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
