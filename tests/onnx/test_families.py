"""Every family either runs as on the native engine, or is refused with the name of the missing feature."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slm_conformance.oracle.families import family_model
from slm_conformance.oracle.family_table import FAMILIES, N_CTX
from slm_core.errors import InvalidPosition, UnsupportedModel
from slm_core.types import ContextOptions, EditLevel, ModelOptions, Pos
from slm_native.backend import NativeBackend
from slm_onnx.backend import OnnxBackend

RUN = {"mixtral", "qwen2moe", "qwen3moe", "qwen3vlmoe", "olmoe", "granitemoe", "granitemoe_shared", "dbrx"} | {
    "glm4moe",
    "glm4moe_mtp",
}
LACKING = {"expert_count", "altup.num_inputs", "ssm.state_size", "shortconv.l_cache", "wkv.head_size"} | {
    "attention.key_length_swa"  # heads with another width in layers with a window
}
REFUSED = {name for name, family in FAMILIES.items() if LACKING & family.metadata.keys()} - RUN
FLOAT32 = 1e-4  # clause 9 of the contract, relative
SIZES = ContextOptions(n_ctx=256)
WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
PROMPT, CHUNK, CUT = 110, 20, (17, 30)  # longer than the windows of 48, also after the cut


def run_session(backend, options, path, feed, tokens):
    """Logits of a prompt, a chunk, single tokens, and of more tokens after a cut (if the model supports cuts)."""
    prompt, chunk, single, last = tokens[:PROMPT], tokens[PROMPT : PROMPT + CHUNK], tokens[-9:-4], tokens[-4:]
    loading = ModelOptions(n_threads=1 if backend.name == "onnx" else None, backend_options=options)
    with backend.load(path, loading) as model, model.new_context(SIZES) as context:
        rows = [feed(context, prompt), feed(context, chunk), *(feed(context, [token]) for token in single)]
        if context.edit_level is EditLevel.CUT:
            context.cut(Pos(0, CUT[0]), Pos(0, CUT[1]))
        return [*rows, feed(context, last)]


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - REFUSED))
def test_supported_families_equal_the_native_engine(tmp_path, feed, random_tokens, assert_close, family):
    path, tokens = family_model(tmp_path, family), random_tokens(PROMPT + CHUNK + 9)
    assert OnnxBackend().supports(path).supported
    ours = run_session(OnnxBackend(), {}, path, feed, tokens)
    native = run_session(NativeBackend(), {"tier": "reference"}, path, feed, tokens)
    for actual, expected in zip(ours, native, strict=True):
        assert_close(actual, expected, FLOAT32)


@pytest.mark.parametrize("family", ["gemma3", "phi3", "falcon", "olmo2", "llama_biases", "qwen2moe"])
def test_quantized_families_equal_the_native_engine(tmp_path, feed, random_tokens, assert_close, family, monkeypatch):
    wide = {
        **FAMILIES[family].metadata,
        **dict.fromkeys(WIDTHS, 32),
        "embedding_length": 160,
    }  # multiples of the blocks of Q8_0
    monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], metadata=wide))
    path, tokens = family_model(tmp_path, family, "q8_0"), random_tokens(PROMPT + CHUNK + 9)
    ours = run_session(OnnxBackend(), {"accuracy_level": 0}, path, feed, tokens)
    native = run_session(NativeBackend(), {"tier": "reference"}, path, feed, tokens)
    for actual, expected in zip(ours, native, strict=True):
        assert_close(actual, expected, FLOAT32)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_unsupported_families_are_refused_with_the_missing_feature(tmp_path, family):
    path = family_model(tmp_path, family)
    support = OnnxBackend().supports(path)
    assert not support.supported
    assert "lacks" in support.reason or "does not implement" in support.reason
    with pytest.raises(UnsupportedModel, match=r"which onnx lacks|onnx does not implement"):
        OnnxBackend().load(path, ModelOptions(n_threads=1))


def test_decoding_beyond_learned_positions_is_refused_and_changes_nothing(
    tmp_path, load, feed, random_tokens, assert_close
) -> None:
    tokens, model = random_tokens(N_CTX + 1), load(family_model(tmp_path, "gpt2"))
    with model.new_context(ContextOptions(n_ctx=N_CTX + 64, n_batch=N_CTX + 64)) as context:
        with pytest.raises(InvalidPosition, match=f"position {N_CTX} of sequence 0: .* 0 to {N_CTX - 1}"):
            feed(context, tokens)
        assert context.length(0) == 0
        whole = feed(context, tokens[:N_CTX])
        with pytest.raises(InvalidPosition):
            feed(context, tokens[:1])
        assert (context.length(0), context.edit_level) == (N_CTX, EditLevel.TRUNCATE)
        context.truncate(Pos(0, 30))
        assert_close(feed(context, tokens[30:40]), whole[30:40], FLOAT32)


def test_a_dump_of_a_long_context_is_replayed_in_a_short_one(tmp_path, load, feed, random_tokens, assert_close) -> None:
    """LongRoPE rotates keys of the two contexts by different tables, so the payload cannot be loaded."""
    tokens, model = random_tokens(50), load(family_model(tmp_path, "phi3_long"))
    long, short, fresh = (model.new_context(ContextOptions(n_ctx=n)) for n in (128, 64, 64))
    feed(long, tokens)
    short.restore(0, long.dump(0))
    feed(fresh, tokens)
    expected = feed(fresh, tokens[:5])
    assert_close(feed(short, tokens[:5]), expected, 1e-5)
    assert abs(feed(long, tokens[:5]) - expected).max() > 0.1, "the tables differ"


def test_head_widths_without_a_kernel_are_refused_before_loading(tmp_path, monkeypatch) -> None:
    narrow = {**FAMILIES["qwen3"].metadata, **dict.fromkeys(WIDTHS, 12)}
    monkeypatch.setitem(FAMILIES, "qwen3", replace(FAMILIES["qwen3"], metadata=narrow))
    support = OnnxBackend().supports(family_model(tmp_path, "qwen3"))
    assert not support.supported
    assert "heads of 12 values (accepted: multiples of 8)" in support.reason
