"""The forward pass as a list of steps: each maps the residual stream to the residual stream."""

from slm_native.steps.altup import (
    AltUpStep,
    LaurelStep,
    LayerEmbeddingStep,
    LayerEmbeddingTable,
    MergeStep,
    SpreadStep,
)
from slm_native.steps.attention import (
    AttentionStep,
    BidirectionalAttention,
    MultiHeadLatentAttention,
    SelfAttention,
    SharedKvAttention,
)
from slm_native.steps.base import Hidden, PlanKind, Residual, Step, StepInputs, run_steps
from slm_native.steps.feedforward import DenseAndMoeStep, FeedForwardStep, FfnStep, MoeStep, ParallelStep
from slm_native.steps.recurrent import HybridStep, RecurrentStep
from slm_native.steps.rwkv import RwkvStep
from slm_native.steps.simple import ControlVectorStep, KeepStep, NormStep, ScaleStep, TransferStep

__all__ = [
    "AltUpStep",
    "AttentionStep",
    "BidirectionalAttention",
    "ControlVectorStep",
    "DenseAndMoeStep",
    "FeedForwardStep",
    "FfnStep",
    "Hidden",
    "HybridStep",
    "KeepStep",
    "LaurelStep",
    "LayerEmbeddingStep",
    "LayerEmbeddingTable",
    "MergeStep",
    "MoeStep",
    "MultiHeadLatentAttention",
    "NormStep",
    "ParallelStep",
    "PlanKind",
    "RecurrentStep",
    "Residual",
    "RwkvStep",
    "ScaleStep",
    "SelfAttention",
    "SharedKvAttention",
    "SpreadStep",
    "Step",
    "StepInputs",
    "TransferStep",
    "run_steps",
]
