"""Kernel sets: the arithmetic of a transformer in tiers, one of which is chosen when a model is loaded."""

from slm_native.kernels.altup import AltUp, Laurel, LayerEmbedding
from slm_native.kernels.device import Device, FixedShape, FloatArray
from slm_native.kernels.kernelset import KernelSet
from slm_native.kernels.mixtures import Mixture
from slm_native.kernels.ops import Ops
from slm_native.kernels.parameters import (
    PLAIN,
    Attention,
    ByHead,
    Experts,
    FeedForward,
    LatentAttention,
    Linear,
    Norm,
    Rotation,
    Scoring,
    Weight,
    WeightBytes,
)
from slm_native.kernels.recurrent import Mamba, Mamba2, ShortConv, StateWeights
from slm_native.kernels.rwkv import ChannelMix, LowRank, Rwkv7, RwkvBlock
from slm_native.kernels.select import HOST_DEVICES, TIERS, KernelChoice, select_kernels, tuned_types, uses_torch

__all__ = [
    "HOST_DEVICES",
    "PLAIN",
    "TIERS",
    "AltUp",
    "Attention",
    "ByHead",
    "ChannelMix",
    "Device",
    "Experts",
    "FeedForward",
    "FixedShape",
    "FloatArray",
    "KernelChoice",
    "KernelSet",
    "LatentAttention",
    "Laurel",
    "LayerEmbedding",
    "Linear",
    "LowRank",
    "Mamba",
    "Mamba2",
    "Mixture",
    "Norm",
    "Ops",
    "Rotation",
    "Rwkv7",
    "RwkvBlock",
    "Scoring",
    "ShortConv",
    "StateWeights",
    "Weight",
    "WeightBytes",
    "select_kernels",
    "tuned_types",
    "uses_torch",
]
