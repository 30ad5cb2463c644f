"""Quantized experts; float experts are in test_families. The oracle is the reference tier of the native engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slm_conformance.oracle.families import family_model
from slm_conformance.oracle.family_table import FAMILIES
from slm_conformance.suite.tolerance import relative_errors
from slm_core.errors import UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.quantizing import quantize_model
from slm_core.types import ContextOptions, ModelOptions
from slm_native.backend import NativeBackend
from slm_onnx import providers, selfcheck
from slm_onnx.backend import OnnxBackend
from slm_onnx.coverage import read_supported
from slm_onnx.decoder import DecoderGraph
from slm_onnx.nbits import PackedMatrix, finer
from slm_onnx.products import GraphOptions

FLOAT32 = 1e-4  # clause 9 of the contract, relative
MARGIN = 1.2
"""The bound of clause 9, relative to the error of llama.cpp, which rounds activations to int8 on every processor. The
native engine does not (with AMX it rounds prompts to bf16). Rounding may select another expert for a token, so medians
are compared.
"""
SIZES = ContextOptions(n_ctx=128)
WIDE = {
    "block_count": 2,
    "embedding_length": 256,
    "feed_forward_length": 256,
    "expert_feed_forward_length": 256,
    "expert_shared_feed_forward_length": 256,
}


@pytest.fixture
def quantized(tmp_path, monkeypatch):
    """A function that makes a quantized tiny model of a family, with widths that all types support."""

    def make(family, weight_type, **overrides):
        metadata = FAMILIES[family].metadata
        wide = {**metadata, **{key: value for key, value in WIDE.items() if key in metadata}}
        monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], metadata=wide))
        target = tmp_path / f"{family}-{weight_type}-{len(overrides)}.gguf"
        quantize_model(family_model(tmp_path, family), target, weight_type, overrides=overrides, force=True, pure=True)
        return target

    return make


def test_experts_in_groups_are_refused(tmp_path, monkeypatch):
    """The graph chooses among all experts, so the logits would be others."""
    groups = {"expert_count": 8, "expert_group_count": 2, "expert_group_used_count": 1}
    metadata = FAMILIES["glm4moe"].metadata | groups
    monkeypatch.setitem(FAMILIES, "glm4moe", replace(FAMILIES["glm4moe"], metadata=metadata))
    with pytest.raises(UnsupportedModel, match="needs experts in 2 groups"):
        OnnxBackend().load(family_model(tmp_path, "glm4moe"), ModelOptions())


@pytest.fixture
def exact(feed):
    def rows(path, tokens, tier="reference"):
        options = ModelOptions(backend_options={"tier": tier})
        with NativeBackend().load(path, options) as model, model.new_context(SIZES) as context:
            return feed(context, tokens)

    return rows


def operators(path, level):
    with GgufFile.open(path) as gguf:
        graph = DecoderGraph(gguf, read_supported(gguf), GraphOptions(accuracy_level=level)).build(lambda share: None)
        return {node.op_type for node in graph.model().graph.node}


@pytest.mark.parametrize("family", ["mixtral", "qwen2moe", "olmoe"])
def test_4_bit_experts_equal_the_native_engine(load, feed, random_tokens, assert_close, quantized, exact, family):
    path, tokens = quantized(family, "Q4_0"), random_tokens(40)
    assert "QMoE" in operators(path, 0)
    assert "MoE" not in operators(path, 0)
    actual = feed(load(path, accuracy_level=0).new_context(SIZES), tokens)
    assert_close(actual, exact(path, tokens), FLOAT32)


MIXED = {"gate_exps": "Q4_0", "up_exps": "Q8_0", "down_exps": "Q6_K"}


@pytest.mark.parametrize("overrides", [{}, MIXED], ids=["Q8_0", "mixed"])
def test_8_bit_experts(load, feed, random_tokens, assert_close, quantized, exact, llama_cpp_logits, overrides) -> None:
    """The matrices of a layer may have different types: blocks of 16 and 32, 4 and 8 bits."""
    path, tokens = quantized("qwen3moe", "Q8_0", **overrides), random_tokens(40)
    expected = exact(path, tokens)
    assert {"QMoE"} == {"QMoE", "MoE"} & operators(path, 4)
    ours = np.median(relative_errors(feed(load(path).new_context(SIZES), tokens), expected))
    theirs = np.median(relative_errors(llama_cpp_logits(path, tokens), expected))
    assert 0 < ours < MARGIN * theirs, f"relative error {ours:.1e}, that of llama.cpp is {theirs:.1e}"
    assert {"MoE"} == {"QMoE", "MoE"} & operators(path, 0), "QMoE has no 8-bit products in float"
    assert_close(feed(load(path, accuracy_level=0).new_context(SIZES), tokens), expected, FLOAT32)


@pytest.mark.parametrize("weight_type", ["Q4_K_M", "Q5_1"])
def test_affine_types_are_refused_by_name(quantized, weight_type) -> None:
    path = quantized("mixtral", weight_type)
    name = weight_type.removesuffix("_M")
    assert f"no experts in {name}" in OnnxBackend().supports(path).reason
    with pytest.raises(UnsupportedModel, match=f"no experts in {name} .accepted: BF16"):
        OnnxBackend().load(path, ModelOptions("cpu", 1))


def test_other_devices_are_refused_by_name(tmp_path, monkeypatch) -> None:
    path = family_model(tmp_path, "mixtral")
    monkeypatch.setattr(providers, "installed", lambda: ("CUDAExecutionProvider", "CPUExecutionProvider"))
    monkeypatch.setattr(selfcheck, "require", lambda device, options, of_directory: None)
    assert OnnxBackend().supports(path, "cpu").supported
    assert 'use device="cpu"' in OnnxBackend().supports(path, "cuda").reason
    with pytest.raises(UnsupportedModel, match="experts on the CPU alone"):
        OnnxBackend().load(path, ModelOptions("cuda", 1))


def test_finer_codes_represent_the_same_weights() -> None:
    rng = np.random.default_rng(0)
    coarse = PackedMatrix(rng.integers(0, 256, (6, 4, 16), np.uint8), rng.random((6, 4), np.float32), 4, 32, None)
    nibbles = np.stack([coarse.codes & 15, coarse.codes >> 4], axis=-1).reshape(6, 4, 32)
    expected = (nibbles.astype(np.float32) - 8) * coarse.scales[..., None]
    for bits, block in ((8, 32), (8, 16)):
        fine = finer(coarse, bits, block)
        assert fine.codes.shape == (6, 128 // block, block * bits // 8)
        values = (fine.codes.astype(np.float32) - 128) * fine.scales[..., None]
        assert np.array_equal(values.reshape(6, 128), expected.reshape(6, 128))
    halved = finer(coarse, 4, 16)
    assert halved.codes.shape == (6, 8, 8)
    assert np.array_equal(halved.codes.reshape(-1), coarse.codes.reshape(-1))
