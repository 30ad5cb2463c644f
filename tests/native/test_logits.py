"""Logits of the native engine against llama.cpp and against float64."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import slm_core
from native.exact import exact
from slm_conformance.oracle.factories import SHAPES, make_tiny_model
from slm_conformance.oracle.reference import Reference
from slm_conformance.oracle.weights import Weights
from slm_conformance.suite.tolerance import Precision, Tolerance, relative_errors
from slm_core.types import KvType, Pos

Rows = NDArray[np.floating]
FLOAT32 = 1e-4  # clause 9 of the contract, relative
FLOAT16 = 1e-2
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", SHAPES)


def bound_of(tier: str, weights: Weights) -> float:
    """The bound for a row. For quantized weights the cpu tier rounds activations to int8; other tiers round nothing."""
    if tier != "cpu" or weights.main_type in ("f32", "f16"):
        return FLOAT32
    return Tolerance(weights, Precision.QUANTIZED, KvType.F32).row


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("weight_type", ["f32", "f16", "q8_0"])
def test_every_architecture_and_weight_type_equals_float64(
    tmp_path, tier, load, feed, random_tokens, assert_close, architecture, weight_type
):
    tiny = make_tiny_model(architecture, weight_type, seed=5)
    tokens = random_tokens(150)
    with load(tiny.write(tmp_path / "m.gguf"), tier).new_context(exact(n_ctx=256)) as context:
        actual = feed(context, tokens)
    weights = Weights.of(tiny)
    assert_close(actual, Reference(weights).decode(tokens), bound_of(tier, weights))


@EVERY_ARCHITECTURE
def test_every_architecture_equals_llama_cpp(
    tmp_path, load, feed, random_tokens, assert_close, llama_cpp_logits, architecture
):
    path = make_tiny_model(architecture, "f32", seed=6).write(tmp_path / "m.gguf")
    tokens = random_tokens(100)
    with load(path).new_context(exact(n_ctx=128)) as context:
        assert_close(feed(context, tokens), llama_cpp_logits(path, tokens), FLOAT32)


@pytest.mark.parametrize("shape", ["tiny-qwen3", "tiny-llama"])
def test_published_shapes_in_f16_equal_llama_cpp(
    tmp_path, shared_dir, synth_gguf, load, feed, random_tokens, assert_close, llama_cpp_logits, shape
):
    path = tmp_path / "m.gguf"
    synth_gguf.write_f16(path, shape, str(shared_dir / "oracles" / "vocabs" / "ggml-vocab-llama-spm.gguf"), 0)
    tokens = random_tokens(48, 32000)
    with load(path).new_context(exact(n_ctx=128)) as context:
        assert_close(feed(context, tokens), llama_cpp_logits(path, tokens), FLOAT16)


@pytest.mark.parametrize("weight_type", ["Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K"])
def test_quantized_files_equal_llama_cpp_on_dequantized_weights(
    tmp_path, load, feed, random_tokens, assert_close, llama_cpp_logits, quantized, weight_type
):
    """llama.cpp gets the weights dequantized to float32: for quantized weights it would quantize activations, too."""
    path = quantized(weight_type)
    expanded = dequantize_file(path, tmp_path / "f32.gguf")
    tokens = random_tokens(32)
    with load(path).new_context(exact(n_ctx=64)) as context:
        assert_close(feed(context, tokens), llama_cpp_logits(expanded, tokens), FLOAT32)


def log_softmax(rows: Rows) -> NDArray[np.float64]:
    shifted = rows - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def errors_of(rows: Rows, exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean and the 95th percentile of the relative errors of rows, and the mean KL divergence in nats."""
    errors, expected = relative_errors(rows, exact), log_softmax(exact)
    divergences = (np.exp(expected) * (expected - log_softmax(rows.astype(np.float64)))).sum(axis=1)
    return np.array([errors.mean(), np.quantile(errors, 0.95), divergences.mean()])


ROUNDING = ["BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K"]


@pytest.mark.parametrize("weight_type", ROUNDING)
def test_the_cpu_tier_errs_no_more_than_llama_cpp(
    tmp_path, load, feed, random_tokens, llama_cpp_logits, quantized, weight_type
):
    """Both round activations to int8: the cpu tier with a scale per 32, llama.cpp per 32 or, for K-quants, per 256.

    For BF16 weights llama.cpp rounds activations to bf16, the cpu tier only on processors that multiply bf16.

    The statistics are over 320 rows. Errors of rows vary so much that the largest alone says little.
    """
    path = quantized(weight_type)
    reference = Weights.read(dequantize_file(path, tmp_path / "f32.gguf"))
    samples = [random_tokens(160, seed=seed) for seed in (1, 2)]
    expected = np.concatenate([Reference(reference).decode(tokens) for tokens in samples])
    with load(path, "cpu").new_context(exact(n_ctx=512, n_seq_max=2)) as context:
        ours = np.concatenate([feed(context, tokens, seq_id) for seq_id, tokens in enumerate(samples)])
    theirs = np.concatenate([llama_cpp_logits(path, tokens) for tokens in samples])
    ratios = errors_of(ours, expected) / errors_of(theirs, expected)
    assert ratios.max() <= 1.1, f"ratios to llama.cpp's mean, 95th percentile and divergence: {np.round(ratios, 2)}"


def dequantize_file(source: Path, target: Path) -> Path:
    """A copy of a file with weights that the gguf package dequantized to float32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], item)
    for tensor in reader.tensors:
        shape = tensor.shape[::-1].tolist()
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_the_demo_model_equals_llama_cpp(load, feed, assert_close, llama_cpp_logits):
    """The bound allows for llama.cpp's rounding of activations to int8 for Q8_0 weights."""
    path = Path(slm_core.__file__).with_name("data") / "demo.gguf"
    model = load(path)
    text = "<|im_start|>user\nMy dog is called Rex. What is my dog's name?<|im_end|>\n<|im_start|>assistant\n"
    tokens = model.vocab.encode(text, add_special=True, parse_special=True)
    with model.new_context(exact(n_ctx=256)) as context:
        logits = feed(context, tokens)
        for _ in range(24):
            tokens.append(int(logits[-1].argmax()))
            logits = np.concatenate([logits, feed(context, tokens[-1:])])
    bound = Tolerance(Weights.read(path), Precision.QUANTIZED, KvType.F32).row
    assert_close(logits, llama_cpp_logits(path, tokens), bound)


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_chunks_do_not_matter(tmp_path, tier, load, feed, random_tokens, assert_close, chunk):
    """If activations are rounded, another order of a float32 sum sometimes moves one to the next int8 step."""
    tiny = make_tiny_model("qwen2", "q8_0")
    model = load(tiny.write(tmp_path / "m.gguf"), tier)
    tokens = random_tokens(140)
    with model.new_context(exact(n_ctx=256)) as whole, model.new_context(exact(n_ctx=256)) as chunked:
        assert_close(feed(chunked, tokens, chunk=chunk), feed(whole, tokens), bound_of(tier, Weights.of(tiny)))


def test_attention_of_a_long_prompt_runs_in_blocks(tmp_path, monkeypatch, load, feed, random_tokens, assert_close):
    monkeypatch.setattr("slm_native.kernels.ops._SCORES_AT_A_TIME", 6 * 90 * 11)  # 11 queries at a time
    tiny = make_tiny_model("llama")
    tokens = random_tokens(90)
    with load(tiny.write(tmp_path / "m.gguf")).new_context(exact(n_ctx=128)) as context:
        assert_close(feed(context, tokens), Reference(Weights.of(tiny)).decode(tokens), FLOAT32)


@EVERY_ARCHITECTURE
def test_sequences_in_one_batch_do_not_attend_to_each_other(
    tmp_path, tier, load, random_tokens, assert_close, architecture
):
    """Three sequences of different lengths, with shuffled tokens, in several batches."""
    tiny = make_tiny_model(architecture)
    rng = np.random.default_rng(2)
    tokens = {seq_id: random_tokens(n, seed=seq_id) for seq_id, n in ((0, 70), (1, 5), (2, 130))}
    seq_ids = rng.permutation(np.repeat([0, 1, 2], [70, 5, 130]))
    rows = {seq_id: [] for seq_id in tokens}
    context = load(tiny.write(tmp_path / "m.gguf"), tier).new_context(exact(n_ctx=256, n_seq_max=3))
    for first in range(0, len(seq_ids), 40):
        batch = context.new_batch()
        lengths = [context.length(seq_id) for seq_id in tokens]
        for seq_id in seq_ids[first : first + 40]:
            batch.add(tokens[seq_id][lengths[seq_id]], Pos(int(seq_id), lengths[seq_id]), logits=True)
            lengths[seq_id] += 1
        for seq_id, row in zip(seq_ids[first : first + 40], context.decode(batch), strict=True):
            rows[seq_id].append(row)
    for seq_id, ids in tokens.items():
        assert_close(np.stack(rows[seq_id]), Reference(Weights.of(tiny)).decode(ids), FLOAT32)


def test_decode_returns_the_requested_rows_in_order(tmp_path, load, feed, random_tokens, assert_close):
    model = load(make_tiny_model("qwen3").write(tmp_path / "m.gguf"))
    tokens = random_tokens(20)
    with model.new_context(exact(n_ctx=64)) as context:
        all_rows = feed(context, tokens)
    with model.new_context(exact(n_ctx=64)) as context:
        batch = context.new_batch()
        for position, token in enumerate(tokens):
            batch.add(token, Pos(0, position), logits=position in (3, 4, 17))
        assert_close(context.decode(batch), all_rows[[3, 4, 17]], FLOAT32)
        batch.clear()
        batch.extend(random_tokens(3), Pos(0, 20))
        assert context.decode(batch).shape == (0, model.info.n_vocab)
        assert context.length(0) == 23


def test_weights_beyond_expanded_bytes_give_the_same_logits(tmp_path, load, feed, random_tokens, assert_close):
    path = make_tiny_model("llama", "q8_0").write(tmp_path / "m.gguf")
    tokens = random_tokens(20)
    rows = []
    for expanded_bytes in (0, 1 << 30):
        with load(path, expanded_bytes=expanded_bytes).new_context(exact(n_ctx=64)) as context:
            rows.append(feed(context, tokens))
    assert_close(rows[0], rows[1], FLOAT32)
