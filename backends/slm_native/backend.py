"""The native backend: finds out what it can run, and loads it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from slm_core.architectures import check_tensors, read_spec
from slm_core.errors import BackendUnavailable, InvalidOption, SlmError, UnknownOption, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.types import BackendStatus, DeviceStatus, ModelOptions, Support
from slm_native import torch_devices
from slm_native.context import BACKEND
from slm_native.kernels import HOST_DEVICES, TIERS, KernelChoice, select_kernels
from slm_native.model import NativeModel

# Below engines whose speed has been measured on more machines than this one's.
_RANK = 10
_OPTIONS = MappingProxyType(
    {
        "tier": f"which kernels compute: {', '.join(TIERS)} (auto: torch on a device of torch's, else C++, else NumPy)",
        "expanded_bytes": "memory that weights expanded to floats may take; beyond it they are expanded at each use",
        "dtype": "number format of products in the torch tier: auto (the device's best), float32, bfloat16 or float16",
    }
)


class NativeBackend:
    """Runs GGUF models on NumPy and on C++ kernels."""

    @property
    def name(self) -> str:
        """The name users choose it by."""
        return BACKEND

    @property
    def load_options(self) -> Mapping[str, str]:
        """What ``ModelOptions.backend_options`` may hold."""
        return _OPTIONS

    def status(self) -> BackendStatus:
        """Report which kernels there are and why."""
        try:
            choice = select_kernels()
            reason = f"tier {choice.kernels.name}: {choice.reason}"
            hint = "" if choice.kernels.name == "cpu" else "install the package where there is a C++ compiler"
        except SlmError as error:
            choice = select_kernels("reference")
            reason = f"tier reference alone, and only where it is asked for: {error}"
            hint = "pass the backend option tier='reference', or install the package anew"
        host = DeviceStatus("cpu", available=True, detail=choice.kernels.describe())
        devices, remark = _torch_devices()
        reason = f"{reason}; {remark}"
        return BackendStatus(
            BACKEND, installed=True, version=_version(), devices=(host, *devices), reason=reason, hint=hint
        )

    def supports(self, source: Path, device: str = "auto") -> Support:
        """Say whether it can run ``source`` on ``device``, reading headers only.

        Raises:
            InvalidModelFile: the file is missing or damaged.
        """
        if device not in HOST_DEVICES:
            try:
                select_kernels(device=device)
            except BackendUnavailable as error:
                return Support(False, str(error))
        try:
            with GgufFile.open(source) as gguf:
                spec = read_spec(gguf)
                check_tensors(gguf, spec)
        except UnsupportedModel as error:
            return Support(False, str(error))
        return Support(True, f"a decoder of architecture {spec.architecture}", _RANK)

    def load(self, source: Path, options: ModelOptions) -> NativeModel:
        """Load a model; see ``protocols.Backend.load``."""
        choice = _kernels(options)
        progress = options.progress or (lambda share: None)
        progress(0.0)
        gguf = GgufFile.open(source)
        try:
            return NativeModel(gguf, choice.kernels, progress)
        except BaseException:
            gguf.close()
            raise


def _kernels(options: ModelOptions) -> KernelChoice:
    given = options.backend_options
    if unknown := [name for name in given if name not in _OPTIONS]:
        raise UnknownOption(f"unknown option {unknown[0]!r} of the native backend (accepted: {', '.join(_OPTIONS)})")
    for name, kind in (("tier", str), ("expanded_bytes", int), ("dtype", str)):
        if name in given and (not isinstance(given[name], kind) or isinstance(given[name], bool)):
            raise InvalidOption(f"{name}={given[name]!r} (accepted: {_OPTIONS[name]})")
    return select_kernels(device=options.device, n_threads=options.n_threads, **given)  # type: ignore[arg-type]  # checked above


def _torch_devices() -> tuple[tuple[DeviceStatus, ...], str]:
    """Torch's devices, and what is to be said of its tier in one line."""
    if (missing := torch_devices.why_missing()) is not None:
        return torch_devices.missing_devices(missing), f"no tier torch: {missing}"
    try:
        status = torch_devices.ask()
    except BackendUnavailable as error:
        return torch_devices.missing_devices(str(error)), f"no tier torch: {error}"
    devices = tuple(device for device in status.devices if device.name != "cpu")
    return devices, f"tier torch where it is asked for (torch {status.version})"


def _version() -> str:
    try:
        return importlib.metadata.version("slm-core")
    except importlib.metadata.PackageNotFoundError:
        return f"source tree, numpy {np.__version__}"
