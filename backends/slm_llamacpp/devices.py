"""The devices of this build of llama.cpp, and the choice among them."""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from slm_core.errors import BackendUnavailable
from slm_llamacpp import library

_WANTED = re.compile(r"([a-z]+)(?::([0-9]+))?")
_ALIASES = {"metal": "mtl"}  # ggml's name of Metal devices depends on its version


class DeviceKind(IntEnum):
    """ggml_backend_dev_type."""

    CPU = 0
    GPU = 1
    INTEGRATED_GPU = 2
    ACCELERATOR = 3


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    Attributes:
        handle: ggml's pointer to it.
        name: ggml's name of it, as "CUDA0".
        description: name of the product.
        kind: its kind. An accelerator (BLAS, AMX) works together with the CPU and cannot be chosen.
    """

    handle: int
    name: str
    description: str
    kind: int

    @property
    def label(self) -> str:
        """The name for users: "cpu", "cuda:0", "metal"."""
        family, number = _split(self.name)
        return f"{family}:{number}" if number else family

    @property
    def untried(self) -> bool:
        """Whether the conformance suite has never passed on it: so far it ran on the CPU only."""
        return self.kind != DeviceKind.CPU


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The devices of a model.

    Attributes:
        gpus: the GPUs that take layers; empty for the CPU.
        label: the value of ``ModelInfo.device``.
    """

    gpus: tuple[Device, ...]
    label: str


def all_devices() -> list[Device]:
    """All devices that llama.cpp has registered.

    Raises:
        BackendUnavailable: llama.cpp cannot be loaded.
    """
    library.load()
    ggml = importlib.import_module("llama_cpp._ggml").libggml
    get, count = ggml.ggml_backend_dev_get, ggml.ggml_backend_dev_count
    get.argtypes, get.restype, count.restype = [ctypes.c_size_t], ctypes.c_void_p, ctypes.c_size_t
    name, description, kind = (
        ggml.ggml_backend_dev_name,
        ggml.ggml_backend_dev_description,
        ggml.ggml_backend_dev_type,
    )
    for function, result in ((name, ctypes.c_char_p), (description, ctypes.c_char_p), (kind, ctypes.c_int)):
        function.argtypes, function.restype = [ctypes.c_void_p], result
    handles = [get(i) for i in range(count())]
    return [Device(h, name(h).decode(), (description(h) or b"").decode("utf-8", "replace"), kind(h)) for h in handles]


def choosable(devices: Sequence[Device]) -> list[Device]:
    """The devices that can load a model: all but accelerators, which work together with the CPU."""
    return [device for device in devices if device.kind != DeviceKind.ACCELERATOR]


def choose(wanted: str, devices: Sequence[Device]) -> DeviceChoice:
    """The devices for "auto", "cpu", a family of GPUs ("cuda", "metal", "vulkan", ...) or one of them ("cuda:1").

    "auto" takes all discrete GPUs; without any, all integrated ones; without any, the CPU.

    Raises:
        BackendUnavailable: no such device; the message lists the available ones.
    """
    if wanted == "cpu":
        return DeviceChoice((), "cpu")
    if wanted == "auto":
        for kind in (DeviceKind.GPU, DeviceKind.INTEGRATED_GPU):
            gpus = tuple(device for device in devices if device.kind == kind)
            if gpus:
                return _on(gpus)
        return DeviceChoice((), "cpu")
    chosen = tuple(device for device in _gpus(devices) if _matches(device, wanted))
    if not chosen:
        accepted = ", ".join(["auto", "cpu", *(device.label for device in _gpus(devices))])
        raise BackendUnavailable(f"llama.cpp has no device {wanted!r} here (accepted: {accepted})")
    return _on(chosen)


def _gpus(devices: Sequence[Device]) -> list[Device]:
    return [device for device in devices if device.kind in (DeviceKind.GPU, DeviceKind.INTEGRATED_GPU)]


def _on(gpus: tuple[Device, ...]) -> DeviceChoice:
    return DeviceChoice(gpus, ",".join(gpu.label for gpu in gpus))


def _matches(device: Device, wanted: str) -> bool:
    asked = _WANTED.fullmatch(wanted)
    if asked is None:
        return False
    family, number = _split(device.name)
    families = {family, _ALIASES.get(family, family)}
    asked_family = _ALIASES.get(asked[1], asked[1])
    return asked_family in families and asked[2] in (None, number or "0")


def _split(name: str) -> tuple[str, str]:
    """A device name of ggml, split: "CUDA0" is the "cuda" number "0"; "Metal" has no number."""
    family = name.rstrip("0123456789")
    return family.lower(), name[len(family) :]
