"""The native backend: finds out what it can run, and loads it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from slm_core.errors import BackendUnavailable, InvalidOption, SlmError, UnknownOption, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.types import BackendStatus, DeviceStatus, ModelOptions, Support
from slm_native.architectures import architecture_names, read_spec
from slm_native.context import BACKEND
from slm_native.kernels import TIERS, KernelChoice, select_kernels
from slm_native.model import NativeModel
from slm_native.weights import check_tensors

# Of the engines that can run a file this one is the slower for now: most of its kernels are NumPy's.
_RANK = 10
_DEVICES = ("auto", "cpu")
_OPTIONS = MappingProxyType(
    {
        "tier": f"which kernels compute: {', '.join(TIERS)} (auto: C++ where it is built, else NumPy)",
        "expanded_bytes": "memory that weights expanded to float32 may take; beyond it they are expanded at each use",
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
        device = DeviceStatus("cpu", available=True, detail=choice.kernels.describe())
        return BackendStatus(BACKEND, installed=True, version=_version(), devices=(device,), reason=reason, hint=hint)

    def supports(self, source: Path, device: str = "auto") -> Support:
        """Say whether it can run ``source`` on ``device``, reading headers only.

        Raises:
            InvalidModelFile: the file is missing or damaged.
        """
        if device not in _DEVICES:
            return Support(False, _no_device(device))
        try:
            with GgufFile.open(source) as gguf:
                check_tensors(gguf, read_spec(gguf))
        except UnsupportedModel as error:
            return Support(False, str(error))
        return Support(True, f"one of the architectures {', '.join(architecture_names())}", _RANK)

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
    if options.device not in _DEVICES:
        raise BackendUnavailable(_no_device(options.device))
    if options.n_threads is not None:
        raise InvalidOption(
            f"n_threads={options.n_threads!r}: the native engine computes with NumPy, whose threads are set before"
            " Python starts, by OMP_NUM_THREADS or OPENBLAS_NUM_THREADS (accepted: None)"
        )
    given = options.backend_options
    if unknown := [name for name in given if name not in _OPTIONS]:
        raise UnknownOption(f"unknown option {unknown[0]!r} of the native backend (accepted: {', '.join(_OPTIONS)})")
    for name, kind in (("tier", str), ("expanded_bytes", int)):
        if name in given and (not isinstance(given[name], kind) or isinstance(given[name], bool)):
            raise InvalidOption(f"{name}={given[name]!r} (accepted: {_OPTIONS[name]})")
    return select_kernels(**given)  # type: ignore[arg-type]  # checked above


def _no_device(device: str) -> str:
    return f"the native backend has no device {device!r} (accepted: {', '.join(_DEVICES)})"


def _version() -> str:
    try:
        return importlib.metadata.version("slm-core")
    except importlib.metadata.PackageNotFoundError:
        return f"source tree, numpy {np.__version__}"
