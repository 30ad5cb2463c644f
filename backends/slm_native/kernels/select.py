"""Chooses the kernel set of a model, and reports the reason."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from slm_core.errors import BackendUnavailable, InvalidOption
from slm_native import _extension, torch_devices
from slm_native.kernels.kernelset import KernelSet
from slm_native.kernels.reference import DEFAULT_EXPANDED_BYTES, ReferenceKernels
from slm_native.profile import Profile

TIERS = ("auto", "reference", "cpu", "torch")
HOST_DEVICES = ("auto", "cpu")
"""The devices of the tiers without torch."""
ISA_VARIABLE = "SLM_NATIVE_ISA"
_OLDEST_TRITON = 3, 4
"""The first version whose language has tuples that grow in unrolled loops."""


class KernelChoice(NamedTuple):
    """A kernel set, and the reason for the choice in one line."""

    kernels: KernelSet
    reason: str


def select_kernels(
    tier: str = "auto",
    *,
    device: str = "auto",
    n_threads: int | None = None,
    expanded_bytes: int | None = None,
    dtype: str = "auto",
    profile: Profile | None = None,
    device_map: Literal["auto"] | Mapping[str, int] | None = None,
) -> KernelChoice:
    """Choose the kernels of a model.

    Args:
        tier: "reference" for NumPy only, "cpu" for the C++ extension, "torch" for any torch device. "auto" is torch if
            ``device`` is not the CPU, and otherwise the extension if it was built. The environment variable
            ``SLM_NATIVE_ISA`` ("scalar", "avx2", "avx_vnni", "avx512", "avx512_bf16", "amx", "amx_plain", "neon",
            "neon_i8mm") forces the extension's instruction set.
        device: "cpu", or a torch device ("cuda:0", "mps"); "auto" is the CPU, or torch's best device in the torch tier.
        n_threads: threads of the extension; None for one per physical core available to this process.
        expanded_bytes: memory for dequantized weights, in bytes; None for the tier's default.
        dtype: number format of the torch tier's products: "float32", "bfloat16", "float16", or "auto" for the device's
            best. The other tiers choose it by the weights.
        profile: profile of the torch tier; its dtype is the default. None for the device's default.
        device_map: number of layers on each device of the torch tier, in order; "auto" to split by memory.

    Raises:
        InvalidOption: an unknown tier, a dtype that the tier does not support, a negative size, no thread, threads for
            another tier than the extension, or an instruction set that is unknown or missing on this machine.
        BackendUnavailable: the tier or device is missing or broken.
    """
    if tier not in TIERS:
        raise InvalidOption(f"unknown tier {tier!r} (accepted: {', '.join(TIERS)})")
    if expanded_bytes is not None and expanded_bytes < 0:
        raise InvalidOption(f"expanded_bytes is {expanded_bytes}, and must not be negative")
    if uses_torch(tier, device):
        if n_threads is not None:
            raise InvalidOption(f"n_threads={n_threads!r}: torch has threads of its own (accepted: None)")
        dtype = profile.dtype if dtype == "auto" and profile is not None else dtype
        return _torch(tier, device, (dtype, expanded_bytes or 0, profile, device_map))
    if device_map is not None:
        raise InvalidOption(
            f"device_map is for the torch tier, and tier {tier!r} was asked for (accepted: tier='torch')"
        )
    if profile is not None:
        raise InvalidOption(
            f"a profile is for the torch tier, and tier {tier!r} was asked for (accepted: tier='torch')"
        )
    if device not in HOST_DEVICES:
        raise InvalidOption(f"tier {tier!r} computes on the CPU, not on {device!r} (accepted: tier='torch')")
    if dtype not in ("auto", "float32"):
        raise InvalidOption(f"tier {tier!r} does not compute in {dtype!r} as asked (accepted: tier='torch')")
    return _host(tier, n_threads, DEFAULT_EXPANDED_BYTES if expanded_bytes is None else expanded_bytes)


def tuned_types(device: str = "auto") -> frozenset[int]:
    """Weight types (ggml's numbers) whose products were measured against other engines on a device.

    Creates no kernel set: no thread starts, and torch is queried in a subprocess.

    Raises:
        InvalidOption: the instruction set of ``SLM_NATIVE_ISA`` is unknown or missing.
        BackendUnavailable: no such device, or its library is missing or broken.
    """
    if uses_torch("auto", device):
        _check_torch(f"device {device!r} is torch's")
        torch_devices.ask().named(device)
        return frozenset()
    isa = _host_isa("auto")
    if _extension.why_missing() is not None:
        return frozenset()
    from slm_native.kernels import cpu

    return cpu.tuned_types(isa)


def uses_torch(tier: str, device: str) -> bool:
    """Whether the torch tier is used."""
    return tier == "torch" or (tier == "auto" and device not in HOST_DEVICES)


def _host(tier: str, n_threads: int | None, expanded_bytes: int) -> KernelChoice:
    if tier == "reference":
        return _reference(n_threads, expanded_bytes, "the reference tier was asked for")
    isa = _host_isa(tier)
    if (missing := _extension.why_missing()) is not None:
        return _reference(n_threads, expanded_bytes, f"the C++ extension is missing: {missing}")
    return _cpu(isa, n_threads, expanded_bytes)


def _host_isa(tier: str) -> str | None:
    """The forced instruction set; raises if there is no extension."""
    isa = os.environ.get(ISA_VARIABLE) or None
    missing = _extension.why_missing()
    if missing is not None and (tier == "cpu" or isa):
        asked = f"{ISA_VARIABLE}={isa}" if isa else "tier 'cpu'"
        raise BackendUnavailable(f"{asked} needs the C++ extension, which is missing: {missing}")
    return isa


def _reference(n_threads: int | None, expanded_bytes: int, reason: str) -> KernelChoice:
    if n_threads is not None:
        raise InvalidOption(
            f"n_threads={n_threads!r}: {reason}, and NumPy's threads are set before Python starts, by OMP_NUM_THREADS"
            " or OPENBLAS_NUM_THREADS (accepted: None)"
        )
    return KernelChoice(ReferenceKernels(expanded_bytes), reason)


def _cpu(isa: str | None, n_threads: int | None, expanded_bytes: int) -> KernelChoice:
    from slm_native.kernels.cpu import CpuKernels

    kernels = CpuKernels(isa, n_threads, expanded_bytes)
    how = f"forced by {ISA_VARIABLE}" if isa else "the best that this machine has"
    return KernelChoice(kernels, f"the C++ extension is built; instruction set {kernels.isa}, {how}")


def _torch(tier: str, device: str, options: tuple[str, int, Profile | None, Any]) -> KernelChoice:
    asked = "the torch tier was asked for" if tier == "torch" else f"device {device!r} is torch's"
    _check_torch(asked)
    try:
        from slm_native.kernels.torch.kernels import TorchKernels
    except (ImportError, OSError) as error:
        raise BackendUnavailable(f"{asked}, and torch is there but does not load: {error}") from error
    kernels, why = TorchKernels(device, *options), ""
    why = "Triton kernels are for CUDA" if not kernels.device.startswith("cuda") else why_without_triton()
    if why and options[2] is not None and options[2].tune:
        raise InvalidOption(f"tune=true on {kernels.device}: {why} (accepted: false)")
    if why:
        return KernelChoice(kernels, f"{asked}; {why}")
    from slm_native.kernels.torch.triton.kernels import TritonKernels

    return KernelChoice(TritonKernels(device, *options), f"{asked}; triton is installed")


def why_without_triton() -> str:
    """Why Triton's kernels cannot be used; "" if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (to get it: pip install triton)"
    version: str = importlib.import_module("triton").__version__
    numbers = tuple(int(number) for number in version.split(".")[:2])
    if numbers < _OLDEST_TRITON:
        needed = ".".join(map(str, _OLDEST_TRITON))
        return f"triton {version} is installed, and the kernels need {needed} or later, which torch 2.8 brings"
    return ""


def _check_torch(asked: str) -> None:
    if (missing := torch_devices.why_missing()) is not None:
        raise BackendUnavailable(f"{asked}: {missing}")
