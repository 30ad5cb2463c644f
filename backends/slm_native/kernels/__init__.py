"""Kernel sets: the arithmetic of a transformer in tiers, one of which is chosen when a model is loaded."""

from slm_native.kernels.kernelset import PLAIN, FloatArray, KernelSet, Scoring
from slm_native.kernels.parameters import Linear, Norm, Rotation, Weight
from slm_native.kernels.select import HOST_DEVICES, TIERS, KernelChoice, select_kernels

__all__ = [
    "HOST_DEVICES",
    "PLAIN",
    "TIERS",
    "FloatArray",
    "KernelChoice",
    "KernelSet",
    "Linear",
    "Norm",
    "Rotation",
    "Scoring",
    "Weight",
    "select_kernels",
]
