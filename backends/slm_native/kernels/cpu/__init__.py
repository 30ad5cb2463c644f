"""The cpu tier: C++ kernels that read the file's blocks as they lie there."""

from slm_native.kernels.cpu.handles import CpuWeight
from slm_native.kernels.cpu.kernels import CpuKernels, tuned_types

__all__ = ["CpuKernels", "CpuWeight", "tuned_types"]
