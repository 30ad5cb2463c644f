"""Experts: routing against its formula, quantized experts against their dequantized weights, unused experts."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest

from native.exact import exact
from slm_conformance.oracle.families import family_model, family_tensors, write_family
from slm_conformance.oracle.family_table import FAMILIES
from slm_conformance.oracle.gguf_writer import StoredTensor
from slm_core.architectures import ExpertsSpec, Gating
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_native.kernels.moe import route
from slm_native.kernels.reference import ReferenceKernels

N_EXPERTS, N_USED = 7, 3


def expected_weights(scores: list[float], gating: Gating, normalized: bool, bias: list[float]) -> dict[int, float]:
    """The selected experts of one token and their weights, by the formula, one number at a time."""
    if gating is Gating.SIGMOID:
        shares = [1 / (1 + math.exp(-score)) for score in scores]
    elif gating is Gating.SOFTMAX:
        shares = [math.exp(score) / math.fsum(map(math.exp, scores)) for score in scores]
    else:
        shares = scores
    selected = sorted(range(len(scores)), key=lambda i: -(shares[i] + bias[i]))[:N_USED]
    weights = {i: shares[i] for i in selected}
    if gating is Gating.SOFTMAX_OF_CHOSEN:
        total = math.fsum(math.exp(weight) for weight in weights.values())
        weights = {i: math.exp(weight) / total for i, weight in weights.items()}
    if gating is Gating.SPARSE_MIXER:
        weights = {i: sparse_mixer_weight(scores, i, selected[:rank]) for rank, i in enumerate(selected)}
    if normalized:
        total = math.fsum(weights.values())
        weights = {i: weight / total for i, weight in weights.items()}
    return weights


def sparse_mixer_weight(scores: list[float], selected: int, before: list[int]) -> float:
    """The weight of an expert: a softmax over unselected experts whose scores are within 2 % of its own."""
    best, total = scores[selected], 0.0
    for i, score in enumerate(scores):
        if i not in before and not (best - score) / max(abs(score), best) > 2 * 0.01:
            total += math.exp(score - best)
    return 1 / total


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("gating", Gating)
@pytest.mark.parametrize("biased", [False, True])
def test_routing(gating, normalized, biased):
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((20, N_EXPERTS)).astype(np.float32)
    if gating is Gating.SPARSE_MIXER:
        scores = 3 + np.float32(0.05) * scores  # so that some scores are within 2 % of others
    bias = rng.standard_normal(N_EXPERTS).astype(np.float32) if biased else None
    routes = route(scores, ExpertsSpec(N_EXPERTS, N_USED, gating, normalized, scale=1.5), bias)
    for row, experts, weights in zip(scores, routes.experts, routes.weights, strict=True):
        expected = expected_weights(
            row.tolist(), gating, normalized, [0] * N_EXPERTS if bias is None else bias.tolist()
        )
        assert dict(zip(experts.tolist(), weights / 1.5, strict=True)) == pytest.approx(expected, rel=1e-5)


def test_experts_are_selected_from_the_best_groups():
    """Eight experts in four groups: a token's three experts are in the two groups with the largest sums of scores."""
    rng = np.random.default_rng(1)
    scores, bias = rng.standard_normal((50, 8)).astype(np.float32), rng.uniform(-0.3, 0.3, 8).astype(np.float32)
    spec = ExpertsSpec(8, 3, Gating.SIGMOID, normalized=True, n_groups=4, n_groups_used=2)
    routes, differ = route(scores, spec, bias), 0
    for row, experts, weights in zip(scores, routes.experts, routes.weights, strict=True):
        shares = [1 / (1 + math.exp(-score)) for score in row.tolist()]
        ranked = [share + one for share, one in zip(shares, bias.tolist(), strict=True)]
        groups = sorted(range(4), key=lambda g: -(ranked[2 * g] + ranked[2 * g + 1]))[:2]
        inside = [expert for expert in range(8) if expert // 2 in groups]
        expected = sorted(inside, key=lambda i: -ranked[i])[:3]
        assert experts.tolist() == expected
        assert weights.tolist() == pytest.approx(
            [shares[i] / sum(shares[j] for j in expected) for i in expected], rel=1e-5
        )
        differ += set(expected) != set(sorted(range(8), key=lambda i: -ranked[i])[:3])
    assert differ > 10, "groups hardly change the selection"


def test_only_the_selected_experts_are_computed(tmp_path, monkeypatch, load, feed):
    used_weights: list[str] = []
    matmul = ReferenceKernels.matmul

    def recording_matmul(self, x, weight, bias=None):
        used_weights.append(weight.tensor.name)
        return matmul(self, x, weight, bias)

    model = load(family_model(tmp_path, "qwen3moe"))
    monkeypatch.setattr(ReferenceKernels, "matmul", recording_matmul)
    with model.new_context(exact(n_ctx=64)) as context:
        feed(context, [5])
        expert_matrices = [name for name in used_weights if "_exps" in name]
        assert len(expert_matrices) == len(set(expert_matrices)) == 3 * 3 * N_USED  # three matrices, three layers
        used_weights.clear()
        feed(context, list(range(40)))
        expert_matrices = [name for name in used_weights if "_exps" in name]
        assert len(expert_matrices) == len(set(expert_matrices)) <= 3 * 3 * N_EXPERTS, (
            "an expert runs once for all its tokens"
        )


def test_mxfp4_experts_equal_their_dequantized_weights(
    tmp_path, tier, load, feed, random_tokens, assert_close, llama_cpp_logits
):
    """llama.cpp gets the dequantized weights: for quantized weights it would round activations.

    The cpu tier rounds them, too: by 2 % of a row (clause 9), and by more if the router then selects another expert.
    """
    rng, kind = np.random.default_rng(0), gguf.GGMLQuantizationType.MXFP4
    packed, expanded = {}, {}
    for name, shape in family_tensors("gpt_oss").items():
        values = rng.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(shape[-1]))
        packed[name] = expanded[name] = StoredTensor.pack(values + np.float32("norm" in name), "f32")
        if name.endswith("_exps.weight"):
            blocks = gguf.quants.quantize(values, kind)
            packed[name] = StoredTensor(shape, "mxfp4", blocks.tobytes())
            expanded[name] = StoredTensor.pack(gguf.quants.dequantize(blocks, kind).reshape(shape), "f32")
    tokens = random_tokens(60)
    with load(write_family(tmp_path / "a.gguf", "gpt_oss", packed), tier).new_context(exact(n_ctx=64)) as context:
        actual = feed(context, tokens)
    expected = llama_cpp_logits(write_family(tmp_path / "b.gguf", "gpt_oss", expanded), tokens)
    if tier == "cpu":
        assert np.median(np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)) < 0.02
    else:
        assert_close(actual, expected, 1e-4)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("expert_used_count", 8, InvalidModelFile),
        ("expert_used_count", 0, InvalidModelFile),
        ("expert_count", 0, InvalidModelFile),
        ("expert_count", 2**31 - 1, InvalidModelFile),
        ("expert_gating_func", 2, UnsupportedModel),
        ("expert_weights_norm", False, UnsupportedModel),
        ("expert_group_count", 4, UnsupportedModel),
    ],
)
def test_impossible_expert_metadata_is_refused(tmp_path, monkeypatch, load, key, value, error):
    family = FAMILIES["qwen3moe"]
    tensors = {
        name: StoredTensor.pack(np.ones(shape, np.float32), "f32") for name, shape in family_tensors("qwen3moe").items()
    }
    monkeypatch.setitem(FAMILIES, "qwen3moe", type(family)("qwen3moe", {**family.metadata, key: value}))
    with pytest.raises(error, match=r"expert|exps|ffn_gate_inp"):
        load(write_family(tmp_path / "m.gguf", "qwen3moe", tensors))
