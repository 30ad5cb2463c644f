"""Chooses the kernel set of a model, and says why."""

from __future__ import annotations

import os
from typing import NamedTuple

from slm_core.errors import BackendUnavailable, InvalidOption
from slm_native import _extension
from slm_native.kernels.kernelset import KernelSet
from slm_native.kernels.reference import DEFAULT_EXPANDED_BYTES, ReferenceKernels

TIERS = ("auto", "reference", "cpu")
ISA_VARIABLE = "SLM_NATIVE_ISA"


class KernelChoice(NamedTuple):
    """A kernel set, and in one line why it is this one."""

    kernels: KernelSet
    reason: str


def select_kernels(tier: str = "auto", *, expanded_bytes: int = DEFAULT_EXPANDED_BYTES) -> KernelChoice:
    """Choose the kernels of a model.

    Args:
        tier: "reference" for NumPy alone, "cpu" for the C++ extension, "auto" for the extension where it was built.
            The environment variable ``SLM_NATIVE_ISA`` ("scalar", "avx2") forces the extension's instruction set.
        expanded_bytes: how much memory weights expanded to float32 may take.

    Raises:
        InvalidOption: an unknown tier, a negative size, or an instruction set that is unknown or that this machine
            lacks.
        BackendUnavailable: the extension is asked for and missing, or there and broken.
    """
    if tier not in TIERS:
        raise InvalidOption(f"unknown tier {tier!r} (accepted: {', '.join(TIERS)})")
    if expanded_bytes < 0:
        raise InvalidOption(f"expanded_bytes is {expanded_bytes}, and must not be negative")
    if tier == "reference":
        return KernelChoice(ReferenceKernels(expanded_bytes), "the reference tier was asked for")
    isa = os.environ.get(ISA_VARIABLE) or None
    missing = _extension.why_missing()
    if missing is None:
        return _cpu(isa, expanded_bytes)
    if tier == "cpu" or isa:
        asked = f"{ISA_VARIABLE}={isa}" if isa else "tier 'cpu'"
        raise BackendUnavailable(f"{asked} needs the C++ extension, which is missing: {missing}")
    return KernelChoice(ReferenceKernels(expanded_bytes), f"the C++ extension is missing: {missing}")


def _cpu(isa: str | None, expanded_bytes: int) -> KernelChoice:
    from slm_native.kernels.cpu import CpuKernels

    kernels = CpuKernels(isa, expanded_bytes)
    how = f"forced by {ISA_VARIABLE}" if isa else "the best that this machine has"
    return KernelChoice(kernels, f"the C++ extension is built; instruction set {kernels.isa}, {how}")
