"""Logits of ONNX Runtime against float64 and the native engine; their error against that of llama.cpp."""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.oracle.factories import SHAPES, make_tiny_model
from slm_conformance.oracle.reference import Reference
from slm_conformance.oracle.weights import Weights
from slm_conformance.suite.tolerance import relative_errors
from slm_core.types import ContextOptions, ModelOptions
from slm_native.backend import NativeBackend

FLOAT32 = 1e-4  # clause 9 of the contract, relative
MARGIN = 1.2  # clause 9, relative to the error of llama.cpp, if activations are quantized
WEIGHT_TYPES = ["Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K"]
SIZES = ContextOptions(n_ctx=256)


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize("weight_type", ["f32", "f16", "q8_0"])
def test_every_architecture_equals_float64(
    tmp_path, load, feed, random_tokens, assert_close, architecture, weight_type
):
    tiny = make_tiny_model(architecture, weight_type, seed=5)
    tokens = random_tokens(150)
    with load(tiny.write(tmp_path / "m.gguf"), accuracy_level=0).new_context(SIZES) as context:
        assert_close(feed(context, tokens), Reference(Weights.of(tiny)).decode(tokens), FLOAT32)


@pytest.fixture(scope="module")
def exact(quantized, feed):
    """Logits of the dequantized weights of a quantized file, from the native engine in float32."""

    def rows(weight_type, tokens):
        options = ModelOptions(backend_options={"tier": "reference"})
        with NativeBackend().load(quantized(weight_type), options) as model, model.new_context(SIZES) as context:
            return feed(context, tokens)

    return rows


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_quantized_weights_in_float_equal_the_native_engine(
    load, feed, random_tokens, assert_close, quantized, exact, weight_type
):
    tokens = random_tokens(24)
    with load(quantized(weight_type), accuracy_level=0).new_context(SIZES) as context:
        assert_close(feed(context, tokens), exact(weight_type, tokens), FLOAT32)


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_activations_in_eight_bits_err_no_more_than_llama_cpp(
    load, feed, random_tokens, llama_cpp_logits, quantized, exact, weight_type
):
    tokens = random_tokens(96)
    expected = exact(weight_type, tokens)
    with load(quantized(weight_type)).new_context(SIZES) as context:
        ours = relative_errors(feed(context, tokens), expected).mean()
    theirs = relative_errors(llama_cpp_logits(quantized(weight_type), tokens), expected).mean()
    assert 0 < ours <= MARGIN * theirs, f"mean error {ours:.1e}, that of llama.cpp is {theirs:.1e}"


def test_logits_do_not_depend_on_the_number_of_threads(tmp_path, feed, random_tokens):
    pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")
    from slm_onnx.backend import OnnxBackend

    path, tokens, rows = make_tiny_model("llama", "q8_0").write(tmp_path / "m.gguf"), random_tokens(50), []
    for n_threads in (1, 2):
        with OnnxBackend().load(path, ModelOptions("cpu", n_threads)) as model, model.new_context(SIZES) as context:
            rows.append(feed(context, tokens))
    assert np.array_equal(rows[0], rows[1])
