"""Kernel sets: the arithmetic of a transformer in tiers, one of which is chosen when a model is loaded."""

from slm_native.kernels.kernelset import FixedShape, FloatArray, FusedBlocks, KernelSet
from slm_native.kernels.mixtures import Mixture
from slm_native.kernels.parameters import (
    PLAIN,
    Experts,
    FeedForward,
    Linear,
    Norm,
    PlainBlock,
    Rotation,
    Scoring,
    Weight,
    WeightBytes,
)
from slm_native.kernels.select import HOST_DEVICES, TIERS, KernelChoice, select_kernels, uses_torch

__all__ = [
    "HOST_DEVICES",
    "PLAIN",
    "TIERS",
    "Experts",
    "FeedForward",
    "FixedShape",
    "FloatArray",
    "FusedBlocks",
    "KernelChoice",
    "KernelSet",
    "Linear",
    "Mixture",
    "Norm",
    "PlainBlock",
    "Rotation",
    "Scoring",
    "Weight",
    "WeightBytes",
    "select_kernels",
    "uses_torch",
]
