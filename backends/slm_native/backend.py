"""The native backend: status, support, loading."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from slm_core.architectures import check_tensors, read_spec
from slm_core.checkpoints import open_model
from slm_core.errors import BackendUnavailable, InvalidOption, SlmError, UnknownOption, UnsupportedModel
from slm_core.types import BackendStatus, DeviceStatus, ModelOptions, ModelSource, SourceKind, Support
from slm_native import torch_devices
from slm_native.context import BACKEND
from slm_native.kernels.select import HOST_DEVICES, TIERS, KernelChoice, select_kernels, tuned_types, uses_torch
from slm_native.model import NativeModel
from slm_native.offload import Offload
from slm_native.profile import Profile, find_profile

_RANK, _TUNED_RANK = 10, 60
"""Ranks: below other optimized engines, or above them for formats whose products were measured against theirs."""
_OPTIONS = MappingProxyType(
    {
        "tier": f"which kernels compute: {', '.join(TIERS)} (auto: torch on a device of torch's, else C++, else NumPy)",
        "expanded_bytes": "memory that weights expanded to floats may take; beyond it they are expanded at each use",
        "dtype": "number format of products in the torch tier: auto (the device's best), float32, bfloat16 or float16",
        "resident_bytes": "memory that the layers' weights may take; layers beyond it are read again in every pass",
        "profile": "TOML file for the torch tier: dtype, buckets, graphs (default: SLM_PROFILE, or MODEL.profile.toml)",
        "device_map": "layers on each of torch's devices in order, as {'cuda:0': 20, 'cuda:1': 16}, or auto",
        "swa_full": "whether layers with a window keep all positions: true (default), so that a context can be cut, or"
        " false, for memory that does not grow with n_ctx",
        "pinned_layers": "list of layers that always stay in memory with resident_bytes (default: all that fit)",
        "mtp": "whether the layer for multi-token prediction is loaded: true or false (default: if the file has one)."
        " It drafts tokens, and takes the memory and the time of one layer more",
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
        """The options of ``ModelOptions.backend_options``."""
        return _OPTIONS

    @property
    def source_kinds(self) -> frozenset[SourceKind]:
        """Every kind."""
        return frozenset(SourceKind)

    def status(self) -> BackendStatus:
        """List the kernel tiers, with reasons for missing ones."""
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

    def supports(self, source: ModelSource, device: str = "auto") -> Support:
        """Whether the backend can run ``source`` on ``device``; reads headers only.

        Raises:
            InvalidModelFile: the file is missing or damaged.
        """
        tuned: frozenset[int] = frozenset()
        try:
            tuned = tuned_types(device)
        except SlmError as error:
            if device not in HOST_DEVICES:
                return Support(False, str(error))  # the user may still choose another tier on the host
        try:
            with open_model(source) as gguf:
                spec = read_spec(gguf)
                check_tensors(gguf, spec)
                is_tuned = tuned.issuperset(tensor.ggml_type for tensor in gguf.tensors.values())
        except UnsupportedModel as error:
            return Support(False, str(error))
        kind = "a decoder" if spec.causal else "an encoder"
        return Support(True, f"{kind} of architecture {spec.architecture}", _TUNED_RANK if is_tuned else _RANK)

    def load(self, source: ModelSource, options: ModelOptions) -> NativeModel:
        """Load a model; see ``protocols.Backend.load``."""
        _check_options(options.backend_options)
        offload = _offload(options.backend_options)
        profile = _profile(source, options)
        choice = _kernels(options, offload, profile)
        progress = options.progress or (lambda share: None)
        progress(0.0)
        gguf = open_model(source)
        try:
            swa_full = bool(options.backend_options.get("swa_full", True))
            mtp = cast("bool | None", options.backend_options.get("mtp"))
            settings = {"tier": f"{choice.kernels.name}: {choice.reason}"}
            settings |= {} if profile is None else {"profile": str(profile)}
            settings |= {} if offload is None else {"offload": str(offload)}
            return NativeModel(gguf, choice.kernels, progress, offload, swa_full=swa_full, mtp=mtp, settings=settings)
        except BaseException:
            gguf.close()
            raise


def _check_options(options: Mapping[str, object]) -> None:
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise UnknownOption(f"unknown option {unknown[0]!r} of the native backend (accepted: {', '.join(_OPTIONS)})")
    kinds = {
        "tier": str,
        "expanded_bytes": int,
        "dtype": str,
        "resident_bytes": int,
        "pinned_layers": Sequence,
        "profile": str,
        "swa_full": bool,
        "mtp": bool,
    }
    if (device_map := options.get("device_map")) is not None and not _is_device_map(device_map):
        raise InvalidOption(f"device_map={device_map!r} (accepted: {_OPTIONS['device_map']})")
    for name, value in options.items():
        kind = kinds.get(name, object)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidOption(f"{name}={value!r} (accepted: {_OPTIONS[name]})")


def _is_device_map(value: object) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(name, str) and type(n) is int for name, n in value.items())
    return value == "auto"


def _offload(options: Mapping[str, object]) -> Offload | None:
    budget, pinned = options.get("resident_bytes"), options.get("pinned_layers")
    if pinned is not None and not all(type(i) is int for i in cast("Sequence[object]", pinned)):
        raise InvalidOption(f"pinned_layers={pinned!r} (accepted: {_OPTIONS['pinned_layers']})")
    if budget is None:
        if pinned is not None:
            raise InvalidOption("pinned_layers says what stays of the layers that resident_bytes bounds: give both")
        return None
    if options.get("expanded_bytes"):
        raise InvalidOption("expanded_bytes keeps what resident_bytes has no room for (accepted: one of them)")
    return Offload(cast(int, budget), cast("Sequence[int] | None", pinned))


def _profile(source: ModelSource, options: ModelOptions) -> Profile | None:
    """The profile of the torch tier; other tiers refuse a named profile."""
    named = cast("str | None", options.backend_options.get("profile"))
    is_torch = uses_torch(str(options.backend_options.get("tier", "auto")), options.device)
    return find_profile(source if isinstance(source, Path) else None, named) if is_torch or named is not None else None


def _kernels(options: ModelOptions, offload: Offload | None, profile: Profile | None) -> KernelChoice:
    settings: dict[str, Any] = {
        name: options.backend_options.get(name) for name in ("tier", "expanded_bytes", "dtype", "device_map")
    }
    if offload is not None:
        settings["expanded_bytes"] = 0
    settings["profile"] = profile
    named = {name: value for name, value in settings.items() if value is not None}
    return select_kernels(device=options.device, n_threads=options.n_threads, **named)


def _torch_devices() -> tuple[tuple[DeviceStatus, ...], str]:
    """Torch's devices, and one line about the torch tier."""
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
