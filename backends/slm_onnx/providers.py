"""Execution providers: which device name means which, and what is wrong with those that cannot be used."""

from __future__ import annotations

import functools
import math
import mmap
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core import inquiry
from slm_core.errors import BackendUnavailable
from slm_core.types import DeviceStatus, KvType
from slm_onnx import runtime

KV_TYPES: Mapping[str, KvType] = {"float32": KvType.F32, "float16": KvType.F16}
"""The KV type of caches of a dtype."""


@dataclass(frozen=True, slots=True)
class Provider:
    """What ONNX Runtime calls a device.

    Attributes:
        name: of the execution provider.
        package: the build of ONNX Runtime that has it.
        memory: the runtime's name for the device's memory, "" where tensors stay with the host.
        dtype: of activations and of the KV cache.
    """

    name: str
    package: str
    memory: str = ""
    dtype: str = "float32"


_PROVIDERS: Mapping[str, Provider] = {
    "cuda": Provider("CUDAExecutionProvider", "onnxruntime-gpu", "cuda", "float16"),
    "tensorrt": Provider("TensorrtExecutionProvider", "onnxruntime-gpu", "cuda", "float16"),
    "rocm": Provider("MIGraphXExecutionProvider", "onnxruntime-migraphx", "cuda", "float16"),
    "directml": Provider("DmlExecutionProvider", "onnxruntime-directml", "", "float16"),
    "coreml": Provider("CoreMLExecutionProvider", "onnxruntime"),
    "openvino": Provider("OpenVINOExecutionProvider", "onnxruntime-openvino"),
    "webgpu": Provider("WebGpuExecutionProvider", "onnxruntime-webgpu"),
    "cpu": Provider("CPUExecutionProvider", "onnxruntime"),
}
_CPU = "cpu"
_WANTED = re.compile(r"([a-z]+)(?::([0-9]{1,3}))?")


@dataclass(frozen=True, slots=True)
class Device:
    """Where a model runs.

    Attributes:
        label: what users call it: "cpu", "cuda:0".
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
        """Whether the KV cache lies in the host's memory."""
        return not self.provider.memory

    @property
    def is_cpu(self) -> bool:
        """Whether it is the CPU, which has operators that others lack."""
        return self.provider.name == _PROVIDERS[_CPU].name

    @property
    def kv_types(self) -> tuple[KvType, ...]:
        """What keys and values can be kept as, the default first."""
        own = KV_TYPES[self.provider.dtype]
        return (own, KvType.Q8_0) if self.is_cpu else (own,)

    def place(self, array: NDArray[Any]) -> Any:
        """An ``OrtValue`` with an array's values; it shares the array's memory where the device is the host."""
        ort_value = runtime.load().OrtValue
        if self.on_host:
            return ort_value.ortvalue_from_numpy(array)
        return ort_value.ortvalue_from_numpy(array, self.provider.memory, self.device_id)

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

    def session_providers(self, options: Mapping[str, str]) -> list[tuple[str, Mapping[str, str]]]:
        """What a session is given: this provider, and the CPU for operators that it lacks."""
        if self.is_cpu:
            return [(self.provider.name, options)]
        numbered = {"device_id": str(self.device_id)} if self.provider.memory else {}
        return [(self.provider.name, {**numbered, **options}), (_PROVIDERS[_CPU].name, {})]


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
    code = "import onnxruntime; print(*onnxruntime.get_available_providers())"
    return tuple(inquiry.ask("ONNX Runtime", code).split())


def statuses() -> list[DeviceStatus]:
    """Every device that could be asked for, and why not where it cannot be used.

    Raises:
        BackendUnavailable: ONNX Runtime is not installed, or does not load.
    """
    present = installed()
    found = []
    for label, provider in _PROVIDERS.items():
        available = provider.name in present
        missing = f"this build of ONNX Runtime has no {provider.name} (it comes with {provider.package})"
        found.append(DeviceStatus(label, available, provider.name if available else missing))
    return sorted(found, key=lambda device: not device.available)


def choose(wanted: str) -> Device:
    """The device of that name; "auto" is the first of the providers installed.

    Raises:
        BackendUnavailable: no such device, or this build of ONNX Runtime lacks it.
    """
    present = installed()
    if wanted == "auto":
        label = next(label for label, provider in _PROVIDERS.items() if provider.name in present)
        others = ", ".join(name for name in _PROVIDERS if name != label)
        return Device(label, _PROVIDERS[label], 0, f"the first that this build of ONNX Runtime has (not: {others})")
    match = _WANTED.fullmatch(wanted)
    provider = _PROVIDERS.get(match[1]) if match else None
    if match is None or provider is None:
        raise BackendUnavailable(f"unknown device {wanted!r} (accepted: auto, {', '.join(_PROVIDERS)}, or cuda:1)")
    if provider.name not in present:
        raise BackendUnavailable(
            f"device {wanted!r} needs {provider.name}, which this build of ONNX Runtime lacks (it comes with"
            f" {provider.package}; uninstall other builds first)"
        )
    number = int(match[2] or 0)
    if number and not provider.memory:
        raise BackendUnavailable(f"device {wanted!r}: there is one {match[1]!r} (accepted: {match[1]})")
    return Device(f"{match[1]}:{number}" if provider.memory else match[1], provider, number, "asked for")
