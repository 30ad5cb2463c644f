"""Directories written by other tools, against float64 and against the GGUF file with the same weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")

import onnx
from foreign_onnx import LAYOUTS, N_CTX, write_directory
from slm_conformance.oracle.factories import SHAPES, TinyModel, make_tiny_model
from slm_conformance.oracle.gguf_writer import StoredTensor
from slm_conformance.oracle.reference import Reference
from slm_conformance.oracle.weights import Weights
from slm_core.errors import DecodeFailed, InvalidModelFile, InvalidOption, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.tokenization.export import tokenizer_files
from slm_core.types import ContextOptions, EditLevel, KvType, ModelOptions, Pos
from slm_onnx.backend import OnnxBackend
from slm_onnx.convert import convert

FLOAT32 = 1e-4  # clause 9 of the contract, relative
SIZES = ContextOptions(n_ctx=400, n_seq_max=3, n_batch=64)


def make(tiny: TinyModel, folder: Path, layout: str) -> Path:
    with GgufFile.open(tiny.write(folder / "m.gguf")) as gguf:
        return write_directory(tiny, folder / "dir", layout, tokenizer_files(gguf, N_CTX))


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_decodes_and_edits_as_float64(
    tmp_path, load, feed, random_tokens, assert_close, architecture, layout
) -> None:
    tiny, tokens = make_tiny_model(architecture, "f32", seed=5), random_tokens(120)
    reference = Reference(Weights.of(tiny))
    with load(make(tiny, tmp_path, layout)).new_context(SIZES) as context:
        assert context.edit_level is EditLevel.CUT
        assert_close(feed(context, tokens[:70]), reference.decode(tokens[:70]), FLOAT32)
        context.cut(Pos(0, 5), Pos(0, 46))
        reference.cut(5, 46)
        assert_close(feed(context, tokens[70:80]), reference.decode(tokens[70:80]), FLOAT32)
        context.fork(0, 1, 20)
        context.truncate(Pos(0, 30))
        reference.truncate(30)
        dump = context.dump(0)
        expected = reference.decode(tokens[80:100])
        assert_close(feed(context, tokens[80:100]), expected, FLOAT32)
        context.restore(2, dump)
        assert_close(feed(context, tokens[80:100], seq_id=2, chunk=7), expected, FLOAT32)
        assert context.tokens(1) == (*tokens[:5], *tokens[46:61])


def test_sequences_of_one_batch_do_not_mix(tmp_path, load, random_tokens, assert_close) -> None:
    tiny, tokens = make_tiny_model("qwen2", "f32"), random_tokens(12)
    with load(make(tiny, tmp_path, "genai")).new_context(SIZES) as context:
        batch = context.new_batch()
        for i, token in enumerate(tokens):  # two interleaved sequences
            batch.add(token, Pos(i % 2, i // 2), logits=i != 5)
        rows = context.decode(batch)
    expected = np.empty((12, rows.shape[1]))
    for seq_id in range(2):
        expected[seq_id::2] = Reference(Weights.of(tiny)).decode(tokens[seq_id::2])
    assert_close(rows, np.delete(expected, 5, axis=0), FLOAT32)


@pytest.mark.parametrize("layout", ["genai", "one graph"])
def test_nan_raises_and_spoils_no_sequence(tmp_path, load, feed, assert_close, layout) -> None:
    tiny = make_tiny_model("qwen2", "f32")
    expected = Reference(Weights.of(tiny)).decode([1, 2, 3, 4])
    table = tiny.tensors["token_embd.weight"].values().copy()
    table[5] = np.nan
    tiny.tensors["token_embd.weight"] = StoredTensor.pack(table, "f32")
    with load(make(tiny, tmp_path, layout)).new_context(SIZES) as context:
        assert_close(feed(context, [1, 2]), expected[:2], FLOAT32)
        for seq_id in (0, 1):
            with pytest.raises(DecodeFailed, match=f"sequence {seq_id}: the model computed NaN"):
                feed(context, [1, 5, 2], seq_id=seq_id)
        assert (context.length(0), context.length(1)) == (2, 0)
        assert_close(feed(context, [3, 4]), expected[2:], FLOAT32)


def change(file: str, edit: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / file).read_text())
        edit(config)
        (folder / file).write_text(json.dumps(config))

    return apply


def with_float_positions(folder: Path) -> None:
    """Declare positions as floats."""
    model = onnx.load(folder / "model.onnx")
    next(i for i in model.graph.input if i.name == "position_ids").type.tensor_type.elem_type = 1
    onnx.save(model, folder / "model.onnx")


def with_unknown_input(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    for node in model.graph.node:
        node.input[:] = ["token_type_ids" if name == "position_ids" else name for name in node.input]
    next(i for i in model.graph.input if i.name == "position_ids").name = "token_type_ids"
    onnx.save(model, folder / "model.onnx")


def with_invalid_utf8(folder: Path) -> None:
    """Change the name of a dimension to invalid UTF-8."""
    data = (folder / "model.onnx").read_bytes()
    assert b"total" in data
    (folder / "model.onnx").write_bytes(data.replace(b"total", b"t\xe1tal"))


GENAI, DECODER = "genai_config.json", lambda s: s["model"]["decoder"]
REFUSALS = [
    ("genai", change(GENAI, lambda s: s["model"].update(vision={})), UnsupportedModel, "'vision'"),
    ("genai", change(GENAI, lambda s: DECODER(s).update(pipeline=[{}])), UnsupportedModel, "'pipeline'"),
    (
        "genai",
        change(GENAI, lambda s: DECODER(s).update(sliding_window={"a": 1})),
        UnsupportedModel,
        "'sliding_window'",
    ),
    ("genai", change(GENAI, lambda s: DECODER(s)["inputs"].update(past_conv_names="c")), UnsupportedModel, "past_conv"),
    ("genai", change(GENAI, lambda s: DECODER(s)["inputs"].update(input_ids="x")), UnsupportedModel, "no input 'x'"),
    ("genai", change(GENAI, lambda s: DECODER(s)["inputs"].pop("past_key_names")), UnsupportedModel, "k.0"),
    ("genai", change(GENAI, lambda s: DECODER(s)["outputs"].update(logits="y")), UnsupportedModel, "no output 'y'"),
    ("genai", change(GENAI, lambda s: DECODER(s).update(filename="../m.gguf")), InvalidModelFile, "filename"),
    ("genai", change(GENAI, lambda s: s.update(model=3)), InvalidModelFile, "'model' is not an object"),
    ("genai", change(GENAI, lambda s: s["model"].update(context_length="long")), InvalidModelFile, "context_length"),
    ("genai", change(GENAI, lambda s: s["model"].update(eos_token_id=["x"])), InvalidModelFile, "eos_token_id"),
    ("genai", change(GENAI, lambda s: s["model"].update(eos_token_id=1 << 40)), InvalidModelFile, "outside"),
    ("genai", lambda folder: (folder / GENAI).write_text("{"), InvalidModelFile, "JSON"),
    ("genai", lambda folder: (folder / "decoder.onnx").write_bytes(b"\x08\x08garbage"), UnsupportedModel, "refuses"),
    ("genai", lambda folder: (folder / "tokenizer.json").unlink(), InvalidModelFile, r"tokenizer\.json"),
    ("one graph", lambda folder: (folder / "model.onnx").unlink(), InvalidModelFile, "no decoder of a known layout"),
    ("one graph", with_float_positions, UnsupportedModel, r"tensor\(float\)|refuses"),
    ("one graph", with_invalid_utf8, (InvalidModelFile, UnsupportedModel), "not UTF-8|refuses"),
    ("one graph", with_unknown_input, UnsupportedModel, "token_type_ids"),
    ("a pair", lambda f: shutil.move(f / "decoder_model.onnx", f / "model.onnx"), UnsupportedModel, "keys and values"),
    ("one graph", change("config.json", lambda s: s.update(max_position_embeddings=0)), InvalidModelFile, "max_pos"),
]


@pytest.mark.parametrize(("layout", "damage", "error", "message"), REFUSALS)
def test_unsupported_directories_are_refused_by_name(tmp_path, load, layout, damage, error, message) -> None:
    folder = make(make_tiny_model("qwen2", "f32"), tmp_path, layout)
    damage(folder)
    with pytest.raises(error, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "never heard of"])
def test_models_whose_rope_depends_on_the_length_are_replayed(tmp_path, load, kind) -> None:
    folder = make(make_tiny_model("qwen2", "f32"), tmp_path, "one graph")
    change("config.json", lambda s: s.update(rope_scaling={"rope_type": kind, "factor": 2}))(folder)
    with load(folder).new_context(SIZES) as context:
        assert context.edit_level is EditLevel.REPLAY


def test_models_with_different_rope_per_layer_are_not_cut(tmp_path, load) -> None:
    """One layer has other RoPE frequencies, as in some families."""
    folder = make(make_tiny_model("qwen2", "f32"), tmp_path, "one graph")
    model = onnx.load(folder / "model.onnx")
    cosines = next(node for node in model.graph.node if node.op_type == "Cos").output[0]
    last = [node for node in model.graph.node if cosines in node.input][-1]
    last.input[:] = [f"{cosines}.other" if name == cosines else name for name in last.input]
    cos = next(i for i, node in enumerate(model.graph.node) if node.output[0] == cosines)
    model.graph.node.insert(cos + 1, onnx.helper.make_node("Cos", [cosines], [f"{cosines}.other"]))
    onnx.save(model, folder / "model.onnx")
    with load(folder).new_context(SIZES) as context:
        assert context.edit_level is EditLevel.TRUNCATE


def test_decoding_beyond_the_limit_of_the_model_fails(tmp_path, load, feed, random_tokens) -> None:
    folder = make(make_tiny_model("qwen2", "f32"), tmp_path, "one graph")
    change("config.json", lambda s: s.update(max_position_embeddings=30))(folder)
    with load(folder).new_context(SIZES) as context:
        feed(context, random_tokens(28))
        with pytest.raises(DecodeFailed, match="the 30 that the model is made for"):
            feed(context, random_tokens(3))
        assert context.length(0) == 28
        feed(context, random_tokens(2))


def test_options_for_building_graphs_are_refused(tmp_path, load) -> None:
    folder = make(make_tiny_model("qwen2", "f32"), tmp_path, "genai")
    for option in ({"accuracy_level": 4}, {"cache": True}):
        with pytest.raises(InvalidOption, match="of building a graph"):
            load(folder, **option)
    with pytest.raises(InvalidOption, match="accepted: f32"):
        load(folder, spinning=True).new_context(ContextOptions(kv_type_k=KvType.F16))


def test_other_backends_refuse_the_directory(tmp_path) -> None:
    import slm_core as slm

    folder = make(make_tiny_model("qwen3", "f32"), tmp_path, "genai")
    assert "onnxruntime-genai" in OnnxBackend().supports(folder).reason
    with slm.load(folder, n_threads=1) as model:
        assert model.info.backend.startswith("onnx ")
        assert "native: " in model.info.reason
    with pytest.raises(InvalidModelFile, match="a directory without a config"):
        slm.load(folder, backend="native")


def test_the_same_content_has_the_same_fingerprint(tmp_path, load) -> None:
    folder = make(make_tiny_model("qwen3", "f32"), tmp_path, "one graph")
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    first = load(folder).info.fingerprint
    assert load(copy).info.fingerprint == first
    data = bytearray((copy / "model.onnx").read_bytes())
    at = data.index(np.float32(1e6 ** (-2 / 32)).tobytes())  # a frequency
    data[at] ^= 1
    (copy / "model.onnx").write_bytes(data)
    assert load(copy).info.fingerprint != first


def test_n_threads_are_checked_for_directories_too(tmp_path) -> None:
    folder = make(make_tiny_model("qwen3", "f32"), tmp_path, "one graph")
    with pytest.raises(InvalidOption, match="n_threads"):
        OnnxBackend().load(folder, ModelOptions("cpu", 0))


def move_data_outside(folder: Path) -> None:
    """Move the weights out of the directory."""
    (folder / "model.onnx.data").rename(folder.parent / "data")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for place in (entry for tensor in model.graph.initializer for entry in tensor.external_data):
        place.value = "../data" if place.key == "location" else place.value
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def halve_data(folder: Path) -> None:
    data = (folder / "model.onnx.data").read_bytes()
    (folder / "model.onnx.data").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    "damage", [move_data_outside, halve_data, lambda folder: (folder / "model.onnx.data").unlink()]
)
def test_missing_weights_are_refused(tmp_path, load, damage) -> None:
    convert(make_tiny_model("llama", "q8_0").write(tmp_path / "m.gguf"), tmp_path / "dir", lambda share: None)
    damage(tmp_path / "dir")
    with pytest.raises(UnsupportedModel, match="refuses the model") as caught:
        load(tmp_path / "dir")
    assert "\n" not in str(caught.value)
