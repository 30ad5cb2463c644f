"""Kernel sets: the arithmetic of a transformer in tiers, one of which is chosen when a model is loaded."""

from slm_native.kernels.by_head import ByHead
from slm_native.kernels.kernelset import KernelSet
from slm_native.kernels.mixtures import Mixture
from slm_native.kernels.parameters import (
    PLAIN,
    AltUp,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Laurel,
    LayerEmbedding,
    Linear,
    Norm,
    Rotation,
    Scoring,
    Weight,
    WeightBytes,
)
from slm_native.kernels.primitives import FixedShape, FloatArray
from slm_native.kernels.recurrent import Mamba, Mamba2, ShortConv, StateWeights, between_products
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
    "Rotation",
    "Rwkv7",
    "RwkvBlock",
    "Scoring",
    "ShortConv",
    "StateWeights",
    "Weight",
    "WeightBytes",
    "between_products",
    "select_kernels",
    "tuned_types",
    "uses_torch",
]
