"""The cpu tier: C++ kernels that read a model file's quantized blocks in place."""

from slm_native.kernels.cpu.handles import CpuWeight
from slm_native.kernels.cpu.kernels import CpuKernels, tuned_types

__all__ = ["CpuKernels", "CpuWeight", "tuned_types"]
