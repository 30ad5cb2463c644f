"""Kernel sets: the arithmetic of a transformer in tiers, one of which is chosen when a model is loaded."""

from slm_native.kernels.kernelset import FloatArray, KernelSet, RopeStyle, Weight
from slm_native.kernels.select import TIERS, KernelChoice, select_kernels

__all__ = ["TIERS", "FloatArray", "KernelChoice", "KernelSet", "RopeStyle", "Weight", "select_kernels"]
