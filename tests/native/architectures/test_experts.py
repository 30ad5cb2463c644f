"""Experts: routing against its formula, packed experts against what they stand for, and who is touched at all."""

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


def weights_by_hand(scores: list[float], gating: Gating, normalized: bool, bias: list[float]) -> dict[int, float]:
    """The chosen experts of one token and their weights, one number at a time."""
    if gating is Gating.SIGMOID:
        shares = [1 / (1 + math.exp(-score)) for score in scores]
    elif gating is Gating.SOFTMAX:
        shares = [math.exp(score) / math.fsum(map(math.exp, scores)) for score in scores]
    else:
        shares = scores
    chosen = sorted(range(len(scores)), key=lambda i: -(shares[i] + bias[i]))[:N_USED]
    weights = {i: shares[i] for i in chosen}
    if gating is Gating.SOFTMAX_OF_CHOSEN:
        total = math.fsum(math.exp(weight) for weight in weights.values())
        weights = {i: math.exp(weight) / total for i, weight in weights.items()}
    if gating is Gating.SPARSE_MIXER:
        weights = {i: among_the_near(scores, i, chosen[:rank]) for rank, i in enumerate(chosen)}
    if normalized:
        total = math.fsum(weights.values())
        weights = {i: weight / total for i, weight in weights.items()}
    return weights


def among_the_near(scores: list[float], chosen: int, before: list[int]) -> float:
    """The weight of an expert among those not chosen before it whose score is within 2 % of its own."""
    best, total = scores[chosen], 0.0
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
        scores = 3 + np.float32(0.05) * scores  # so that some are within 2 % of others
    bias = rng.standard_normal(N_EXPERTS).astype(np.float32) if biased else None
    routes = route(scores, ExpertsSpec(N_EXPERTS, N_USED, gating, normalized, scale=1.5), bias)
    for row, experts, weights in zip(scores, routes.experts, routes.weights, strict=True):
        wanted = weights_by_hand(row.tolist(), gating, normalized, [0] * N_EXPERTS if bias is None else bias.tolist())
        assert dict(zip(experts.tolist(), weights / 1.5, strict=True)) == pytest.approx(wanted, rel=1e-5)


def test_experts_of_the_best_groups():
    """Eight experts in four groups of two: a token's three are of the two groups with the largest sums."""
    rng = np.random.default_rng(1)
    scores, bias = rng.standard_normal((50, 8)).astype(np.float32), rng.uniform(-0.3, 0.3, 8).astype(np.float32)
    spec = ExpertsSpec(8, 3, Gating.SIGMOID, normalized=True, n_groups=4, n_groups_used=2)
    routes, differ = route(scores, spec, bias), 0
    for row, experts, weights in zip(scores, routes.experts, routes.weights, strict=True):
        shares = [1 / (1 + math.exp(-score)) for score in row.tolist()]
        ranked = [share + one for share, one in zip(shares, bias.tolist(), strict=True)]
        groups = sorted(range(4), key=lambda g: -(ranked[2 * g] + ranked[2 * g + 1]))[:2]
        inside = [expert for expert in range(8) if expert // 2 in groups]
        wanted = sorted(inside, key=lambda i: -ranked[i])[:3]
        assert experts.tolist() == wanted
        assert weights.tolist() == pytest.approx([shares[i] / sum(shares[j] for j in wanted) for i in wanted], rel=1e-5)
        differ += set(wanted) != set(sorted(range(8), key=lambda i: -ranked[i])[:3])
    assert differ > 10, "groups change nothing here"


def test_only_the_experts_of_a_token_are_multiplied_with(tmp_path, monkeypatch, load, feed):
    touched: list[str] = []
    matmul = ReferenceKernels.matmul

    def spy(self, x, weight, bias=None):
        touched.append(weight.tensor.name)
        return matmul(self, x, weight, bias)

    model = load(family_model(tmp_path, "qwen3moe"))
    monkeypatch.setattr(ReferenceKernels, "matmul", spy)
    with model.new_context(exact(n_ctx=64)) as context:
        feed(context, [5])
        of_experts = [name for name in touched if "_exps" in name]
        assert len(of_experts) == len(set(of_experts)) == 3 * 3 * N_USED  # three matrices, three layers
        touched.clear()
        feed(context, list(range(40)))
        of_experts = [name for name in touched if "_exps" in name]
        assert len(of_experts) == len(set(of_experts)) <= 3 * 3 * N_EXPERTS, "an expert runs once for all its tokens"


def test_mxfp4_experts_are_the_numbers_they_stand_for(
    tmp_path, tier, load, feed, random_tokens, assert_close, llama_cpp_logits
):
    """llama.cpp rounds activations where weights are packed, so it is given what the weights stand for.

    So does the cpu tier: by 2 % of a row (clause 9), and more where a router then chooses another expert.
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
        found = feed(context, tokens)
    wanted = llama_cpp_logits(write_family(tmp_path / "b.gguf", "gpt_oss", expanded), tokens)
    if tier == "cpu":
        assert np.median(np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)) < 0.02
    else:
        assert_close(found, wanted, 1e-4)


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
def test_what_cannot_be_is_refused(tmp_path, monkeypatch, load, key, value, error):
    family = FAMILIES["qwen3moe"]
    tensors = {
        name: StoredTensor.pack(np.ones(shape, np.float32), "f32") for name, shape in family_tensors("qwen3moe").items()
    }
    monkeypatch.setitem(FAMILIES, "qwen3moe", type(family)("qwen3moe", {**family.metadata, key: value}))
    with pytest.raises(error, match=r"expert|exps|ffn_gate_inp"):
        load(write_family(tmp_path / "m.gguf", "qwen3moe", tensors))
