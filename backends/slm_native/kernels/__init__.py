"""Kernel sets: the arithmetic that the steps of a model use. The tiers implement it; ``select`` chooses one at load."""

from slm_native.kernels.altup import AltUp, Laurel, LayerEmbedding
from slm_native.kernels.device import Device, FixedShape, FloatArray
from slm_native.kernels.kernelset import KernelSet
from slm_native.kernels.moe import MoeLayer
from slm_native.kernels.ops import Ops
from slm_native.kernels.parameters import (
    PLAIN,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    LayerPositions,
    Linear,
    Lora,
    Norm,
    PerHead,
    Rotation,
    Scoring,
    Weight,
    WeightBytes,
)
from slm_native.kernels.recurrent import Mamba, Mamba2, RecurrentWeights, ShortConv
from slm_native.kernels.rwkv import ChannelMix, LowRank, Rwkv7, RwkvBlock

__all__ = [
    "PLAIN",
    "AltUp",
    "Attention",
    "ChannelMix",
    "Device",
    "Experts",
    "FeedForward",
    "FixedShape",
    "FloatArray",
    "KernelSet",
    "LatentAttention",
    "Laurel",
    "LayerEmbedding",
    "LayerPositions",
    "Linear",
    "Lora",
    "LowRank",
    "Mamba",
    "Mamba2",
    "MoeLayer",
    "Norm",
    "Ops",
    "PerHead",
    "RecurrentWeights",
    "Rotation",
    "Rwkv7",
    "RwkvBlock",
    "Scoring",
    "ShortConv",
    "Weight",
    "WeightBytes",
]
