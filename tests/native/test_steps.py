"""The steps that layers are lowered to, and the steps that the cpu tier fuses.

Other tests compare numbers: test_fused_*.py those of fused calls, architectures/ those of whole models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slm_conformance.oracle.families import family_model
from slm_native import _extension
from slm_native.model import NativeModel
from slm_native.steps import (
    AltUpStep,
    BidirectionalAttention,
    DenseAndMoeStep,
    FfnStep,
    HybridStep,
    LayerEmbeddingStep,
    MergeStep,
    MoeStep,
    MultiHeadLatentAttention,
    NormStep,
    ParallelStep,
    RecurrentStep,
    RwkvStep,
    ScaleStep,
    SelfAttention,
    SharedKvAttention,
    SpreadStep,
    Step,
)

Load = Callable[..., NativeModel]
LOWERED: dict[str, list[type[Step]]] = {
    "qwen3": [SelfAttention, FfnStep] * 3,
    "falcon": [ParallelStep] * 3,
    "falcon_h1": [HybridStep, FfnStep] * 3,
    "jamba": [RecurrentStep, FfnStep, RecurrentStep, MoeStep, SelfAttention, FfnStep, RecurrentStep, MoeStep],
    "mamba": [RecurrentStep] * 3,
    "rwkv7": [RwkvStep] * 3,
    "deepseek2": [MultiHeadLatentAttention, FfnStep] + [MultiHeadLatentAttention, MoeStep] * 2,
    "gemma3n": [SpreadStep, *[AltUpStep] * 25, MergeStep],
    "gemma4": [SelfAttention, FfnStep, LayerEmbeddingStep, ScaleStep] * 5
    + [SharedKvAttention, FfnStep, LayerEmbeddingStep, ScaleStep] * 2,
    "gemma4_experts": [SelfAttention, DenseAndMoeStep, ScaleStep] * 3,
    "bert": [BidirectionalAttention, NormStep, FfnStep, NormStep] * 3,
}
GROUP, RWKV = "CpuLayers", "CpuRwkvLayers"
FUSED = {
    "qwen3": [GROUP],
    "falcon": [GROUP],
    "falcon_h1": ["HybridStep", "FfnStep"] * 3,
    "jamba": ["RecurrentStep", "FfnStep", "RecurrentStep", "MoeStep", GROUP, "RecurrentStep", "MoeStep"],
    "rwkv7": [RWKV, RWKV],  # the last layer is separate: it may compute only the output rows
    "deepseek2": [GROUP],
    "gemma3n": ["SpreadStep", GROUP, "MergeStep"],
    "gemma4": [GROUP],
    "gemma4_experts": [GROUP, "DenseAndMoeStep", "ScaleStep"] * 3,
    "llama4": [
        GROUP,
        "SelfAttention",
        "MoeStep",
        GROUP,
    ],  # the second layer has attention temperatures, so it is not fused
    "bert": ["BidirectionalAttention", "NormStep", "FfnStep", "NormStep"] * 3,
}
needs_extension = pytest.mark.skipif(_extension.why_missing() is not None, reason="the C++ extension is missing")


def steps_of(model: NativeModel) -> Sequence[Any]:
    return model._open_transformer()._layers.steps  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", LOWERED)
def test_layers_are_lowered_to_steps(tmp_path: Path, load: Load, family: str) -> None:
    steps = steps_of(load(family_model(tmp_path, family)))
    assert [type(step) for step in steps] == LOWERED[family]


@needs_extension
@pytest.mark.parametrize("family", FUSED)
def test_consecutive_steps_are_fused(tmp_path: Path, load: Load, family: str) -> None:
    steps = steps_of(load(family_model(tmp_path, family), "cpu"))
    assert [type(step).__name__ for step in steps] == FUSED[family]


@needs_extension
def test_attention_inside_a_hybrid_step_is_fused(tmp_path: Path, load: Load) -> None:
    for step in steps_of(load(family_model(tmp_path, "falcon_h1"), "cpu"))[::2]:
        assert type(step.attention).__name__ == GROUP


@needs_extension
def test_layers_with_different_kv_pages_are_not_fused(tmp_path: Path, load: Load) -> None:
    """Layer 3 of olmo3's layers 0 to 4 keeps all positions; the others keep their sliding windows."""
    path = family_model(tmp_path, "olmo3")
    full, windowed = load(path, "cpu"), load(path, "cpu", swa_full=False)
    (group,) = steps_of(full)
    assert [each.layer for each in group.layers] == [0, 1, 2, 3, 4]
    assert [[each.layer for each in group.layers] for group in steps_of(windowed)] == [[0, 1, 2], [3], [4]]


def test_a_model_describes_its_steps(tmp_path: Path, load: Load) -> None:
    model = load(family_model(tmp_path, "qwen3"))
    attention, feed_forward, *_ = model.steps
    assert attention == "attention q 144x288 k 48x288 v 48x288 output 288x144"
    assert feed_forward == "feed-forward gate 160x288 up 160x288 down 288x160"
    assert len(model.steps) == 6


def test_offloaded_layers_describe_no_steps(tmp_path: Path, load: Load) -> None:
    path = family_model(tmp_path, "qwen3")
    model = load(path, resident_bytes=10**9, pinned_layers=[1])
    first, second, third = model.steps
    assert first == "layer 0: loaded in every pass"
    assert second.startswith("attention q 144x288") and "; feed-forward" in second
    assert third == "layer 2: loaded in every pass"
