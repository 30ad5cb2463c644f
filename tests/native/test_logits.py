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
    """Of a row: beside quantized weights the cpu tier rounds activations to eight bits; the others round nothing."""
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
        found = feed(context, tokens)
    weights = Weights.of(tiny)
    assert_close(found, Reference(weights).decode(tokens), bound_of(tier, weights))


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
def test_quantized_files_equal_llama_cpp_on_the_weights_they_stand_for(
    tmp_path, load, feed, random_tokens, assert_close, llama_cpp_logits, quantized, weight_type
):
    """llama.cpp quantizes activations where weights are quantized, so it is given those weights in float32."""
    path = quantized(weight_type)
    expanded = expand(path, tmp_path / "f32.gguf")
    tokens = random_tokens(32)
    with load(path).new_context(exact(n_ctx=64)) as context:
        assert_close(feed(context, tokens), llama_cpp_logits(expanded, tokens), FLOAT32)


def log_softmax(rows: Rows) -> NDArray[np.float64]:
    shifted = rows - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def errors_of(rows: Rows, exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean relative error of rows, that of all but the worst twentieth, and the mean divergence in nats."""
    errors, wanted = relative_errors(rows, exact), log_softmax(exact)
    divergences = (np.exp(wanted) * (wanted - log_softmax(rows.astype(np.float64)))).sum(axis=1)
    return np.array([errors.mean(), np.quantile(errors, 0.95), divergences.mean()])


ROUNDING = ["BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K"]


@pytest.mark.parametrize("weight_type", ROUNDING)
def test_the_cpu_tier_errs_no_more_than_llama_cpp(
    tmp_path, load, feed, random_tokens, llama_cpp_logits, quantized, weight_type
):
    """Both round activations to eight bits, a scale for each 32 of them here and there for 32 or, beside K-quants, 256.

    DenseAndMoe BF16 both round them to bf16: llama.cpp always, this tier where the processor multiplies such.

    On two times 160 rows; errors of rows are spread so widely that the single worst one says little.
    """
    path = quantized(weight_type)
    reference = Weights.read(expand(path, tmp_path / "f32.gguf"))
    samples = [random_tokens(160, seed=seed) for seed in (1, 2)]
    wanted = np.concatenate([Reference(reference).decode(tokens) for tokens in samples])
    with load(path, "cpu").new_context(exact(n_ctx=512, n_seq_max=2)) as context:
        ours = np.concatenate([feed(context, tokens, seq_id) for seq_id, tokens in enumerate(samples)])
    theirs = np.concatenate([llama_cpp_logits(path, tokens) for tokens in samples])
    ratios = errors_of(ours, wanted) / errors_of(theirs, wanted)
    assert ratios.max() <= 1.1, f"of llama.cpp's mean, 95 % and divergence: {np.round(ratios, 2)}"


def expand(source: Path, target: Path) -> Path:
    """A copy of a file whose weights the gguf package has expanded to float32."""
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
    """llama.cpp rounds activations to eight bits for Q8_0 weights, which the bound allows for."""
    path = Path(slm_core.__file__).with_name("data") / "demo.gguf"
    model = load(path)
    text = "<|im_start|>user\nMy dog is called Rex. What is my dog's name?<|im_end|>\n<|im_start|>assistant\n"
    tokens = model.vocab.encode(text, add_special=True, parse_special=True)
    with model.new_context(exact(n_ctx=256)) as context:
        found = feed(context, tokens)
        for _ in range(24):
            tokens.append(int(found[-1].argmax()))
            found = np.concatenate([found, feed(context, tokens[-1:])])
    bound = Tolerance(Weights.read(path), Precision.QUANTIZED, KvType.F32).row
    assert_close(found, llama_cpp_logits(path, tokens), bound)


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_chunks_do_not_matter(tmp_path, tier, load, feed, random_tokens, assert_close, chunk):
    """Where activations are rounded, a float32 sum made in another order now and then tips one to the next step."""
    tiny = make_tiny_model("qwen2", "q8_0")
    model = load(tiny.write(tmp_path / "m.gguf"), tier)
    tokens = random_tokens(140)
    with model.new_context(exact(n_ctx=256)) as whole, model.new_context(exact(n_ctx=256)) as parts:
        assert_close(feed(parts, tokens, chunk=chunk), feed(whole, tokens), bound_of(tier, Weights.of(tiny)))


def test_a_long_prompt_is_attended_to_block_by_block(tmp_path, monkeypatch, load, feed, random_tokens, assert_close):
    monkeypatch.setattr("slm_native.kernels.ops._SCORES_AT_A_TIME", 6 * 90 * 11)  # 11 queries at a time
    tiny = make_tiny_model("llama")
    tokens = random_tokens(90)
    with load(tiny.write(tmp_path / "m.gguf")).new_context(exact(n_ctx=128)) as context:
        assert_close(feed(context, tokens), Reference(Weights.of(tiny)).decode(tokens), FLOAT32)


@EVERY_ARCHITECTURE
def test_sequences_in_one_batch_do_not_see_each_other(tmp_path, tier, load, random_tokens, assert_close, architecture):
    """Three sequences of different lengths, their tokens shuffled into each other, in several batches."""
    tiny = make_tiny_model(architecture)
    rng = np.random.default_rng(2)
    tokens = {seq_id: random_tokens(n, seed=seq_id) for seq_id, n in ((0, 70), (1, 5), (2, 130))}
    owners = rng.permutation(np.repeat([0, 1, 2], [70, 5, 130]))
    found = {seq_id: [] for seq_id in tokens}
    context = load(tiny.write(tmp_path / "m.gguf"), tier).new_context(exact(n_ctx=256, n_seq_max=3))
    for first in range(0, len(owners), 40):
        batch = context.new_batch()
        done = [context.length(seq_id) for seq_id in tokens]
        for seq_id in owners[first : first + 40]:
            batch.add(tokens[seq_id][done[seq_id]], Pos(int(seq_id), done[seq_id]), logits=True)
            done[seq_id] += 1
        for seq_id, row in zip(owners[first : first + 40], context.decode(batch), strict=True):
            found[seq_id].append(row)
    for seq_id, ids in tokens.items():
        assert_close(np.stack(found[seq_id]), Reference(Weights.of(tiny)).decode(ids), FLOAT32)


def test_rows_come_for_the_tokens_that_asked_and_in_their_order(tmp_path, load, feed, random_tokens, assert_close):
    model = load(make_tiny_model("qwen3").write(tmp_path / "m.gguf"))
    tokens = random_tokens(20)
    with model.new_context(exact(n_ctx=64)) as context:
        every = feed(context, tokens)
    with model.new_context(exact(n_ctx=64)) as context:
        batch = context.new_batch()
        for position, token in enumerate(tokens):
            batch.add(token, Pos(0, position), logits=position in (3, 4, 17))
        assert_close(context.decode(batch), every[[3, 4, 17]], FLOAT32)
        batch.clear()
        batch.extend(random_tokens(3), Pos(0, 20))
        assert context.decode(batch).shape == (0, model.info.n_vocab)
        assert context.length(0) == 23


def test_weights_that_do_not_fit_into_the_expansion_memory_give_the_same_logits(
    tmp_path, load, feed, random_tokens, assert_close
):
    path = make_tiny_model("llama", "q8_0").write(tmp_path / "m.gguf")
    tokens = random_tokens(20)
    rows = []
    for expanded_bytes in (0, 1 << 30):
        with load(path, expanded_bytes=expanded_bytes).new_context(exact(n_ctx=64)) as context:
            rows.append(feed(context, tokens))
    assert_close(rows[0], rows[1], FLOAT32)
