"""Directories converted from GGUF files: complete, and correct for other readers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slm_conformance.oracle.factories import SHAPES, make_tiny_model
from slm_conformance.oracle.reference import Reference
from slm_conformance.oracle.weights import Weights
from slm_core.errors import InvalidModelFile, InvalidOption, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.loading import demo_model_path
from slm_core.types import ContextOptions, ModelOptions
from slm_native.backend import NativeBackend

pytest.importorskip("onnxruntime", reason="it is the engine: pip install 'slm-core[onnx]'")

import onnxruntime

import onnx
from slm_onnx.convert import convert, rope_of, write_graph
from slm_onnx.coverage import read_supported
from slm_onnx.products import GraphOptions
from slm_onnx.standalone import StandaloneGraph

FLOAT32 = 1e-4  # clause 9 of the contract, relative
FILES = {
    *("model.onnx", "model.onnx.data", "genai_config.json", "config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
}


def ignore_progress(share: float) -> None:
    """A progress callback that does nothing."""


def logits(file: Path, chunks: list[list[int]]) -> np.ndarray:
    """Logits of a graph in optimum's layout, run by ONNX Runtime alone, chunk by chunk."""
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    cache = {
        i.name: np.zeros((1, i.shape[1], 0, i.shape[3]), np.float32) for i in session.get_inputs() if len(i.shape) == 4
    }
    outputs, rows, n = [output.name for output in session.get_outputs()], [], 0
    for chunk in chunks:
        inputs = {
            "input_ids": np.array([chunk]),
            "attention_mask": np.ones((1, n + len(chunk)), np.int64),
            "position_ids": np.arange(n, n + len(chunk))[None],
        }
        results = dict(zip(outputs, session.run(outputs, inputs | cache), strict=True))
        cache, n = {name: results[name.replace("past_key_values", "present")] for name in cache}, n + len(chunk)
        rows.append(results["logits"][0])
    return np.concatenate(rows)


def exact_graph(path: Path, folder: Path) -> Path:
    """The same graph with products that do not round activations."""
    with GgufFile.open(path) as gguf:
        spec = read_supported(gguf)
        graph = StandaloneGraph(gguf, spec, GraphOptions(accuracy_level=0), rope_of(gguf, spec), 256).build(
            ignore_progress
        )
        folder.mkdir()
        write_graph(graph.model(), graph.weights, folder)
    return folder / "model.onnx"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("weight_type", ["f32", "f16"])
def test_the_graph_equals_float64(tmp_path, random_tokens, assert_close, architecture, weight_type) -> None:
    tiny, tokens = make_tiny_model(architecture, weight_type, seed=5), random_tokens(60)
    convert(tiny.write(tmp_path / "m.gguf"), tmp_path / "dir", ignore_progress)
    actual = logits(tmp_path / "dir" / "model.onnx", [tokens[:40], tokens[40:59], tokens[59:]])
    assert_close(actual, Reference(Weights.of(tiny)).decode(tokens), FLOAT32)


@pytest.mark.parametrize("weight_type", ["Q4_0", "Q4_K_M", "Q6_K", "Q2_K", "Q5_1"])
def test_quantized_embeddings_are_exact(tmp_path, random_tokens, assert_close, feed, quantized, weight_type) -> None:
    path, tokens = quantized(weight_type), random_tokens(24)
    with NativeBackend().load(path, ModelOptions(backend_options={"tier": "reference"})) as model:
        expected = feed(model.new_context(ContextOptions(n_ctx=256)), tokens)
    assert_close(logits(exact_graph(path, tmp_path / "dir"), [tokens]), expected, FLOAT32)


def test_tied_matrices_are_stored_once(tmp_path) -> None:
    path = make_tiny_model("qwen3", "q8_0").write(tmp_path / "m.gguf")
    convert(path, tmp_path / "dir", ignore_progress)
    graph = onnx.load(tmp_path / "dir" / "model.onnx", load_external_data=False).graph
    offsets = {t.name: {e.key: e.value for e in t.external_data}.get("offset") for t in graph.initializer}
    assert offsets["token_embd.codes"] == offsets["token_embd.codes.rows"] is not None


def test_a_directory_is_complete_and_valid(tmp_path) -> None:
    path = make_tiny_model("llama", "q8_0").write(tmp_path / "m.gguf")
    shares: list[float] = []
    convert(path, tmp_path / "dir", shares.append)
    assert {file.name for file in (tmp_path / "dir").iterdir()} == FILES
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    decoder = json.loads((tmp_path / "dir" / "genai_config.json").read_text())["model"]["decoder"]
    names = {node.name for node in onnxruntime.InferenceSession(tmp_path / "dir" / "model.onnx").get_inputs()}
    shape = SHAPES["llama"]
    for name in decoder["inputs"].values():
        assert {name % i for i in range(shape.n_layers)} <= names if "%d" in name else name in names


def test_transformers_reads_the_settings(tmp_path) -> None:
    transformers = pytest.importorskip("transformers", reason="it reads the files: pip install transformers")
    convert(make_tiny_model("qwen3", "f32").write(tmp_path / "m.gguf"), tmp_path / "dir", ignore_progress)
    config, shape = transformers.AutoConfig.from_pretrained(tmp_path / "dir"), SHAPES["qwen3"]
    assert (config.model_type, config.num_hidden_layers, config.head_dim) == ("qwen3", shape.n_layers, shape.head_dim)
    assert config.rope_parameters["rope_theta"] == shape.rope_freq_base
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "dir")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_onnxruntime_genai_gives_the_greedy_answer(tmp_path, feed) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="it is another reader: pip install onnxruntime-genai")
    convert(demo_model_path(), tmp_path / "demo", ignore_progress)
    reader = genai.Model(str(tmp_path / "demo"))
    ids = (
        genai.Tokenizer(reader).encode("<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n").tolist()
    )
    options = genai.GeneratorParams(reader)
    options.set_search_options(max_length=len(ids) + 16, do_sample=False)
    generator = genai.Generator(reader, options)
    generator.append_tokens(np.array([ids], np.int32))
    theirs: list[int] = []
    while not generator.is_done():
        generator.generate_next_token()
        theirs += generator.get_next_tokens().tolist()
    ours: list[int] = []
    with NativeBackend().load(demo_model_path(), ModelOptions()) as model:
        context, fed = model.new_context(ContextOptions(n_ctx=256)), ids
        assert model.vocab.decode(ids, special=True).startswith("<|im_start|>user\nWhat is")
        while not ours or (ours[-1] not in model.vocab.eog_ids and len(ours) < 16):
            ours.append(int(feed(context, fed)[-1].argmax()))
            fed = ours[-1:]
    assert ours == theirs


def test_an_existing_folder_is_not_changed(tmp_path) -> None:
    path, folder = make_tiny_model("llama", "f32").write(tmp_path / "m.gguf"), tmp_path / "dir"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(InvalidOption, match="is there already"):
        convert(path, folder, ignore_progress)
    assert [file.name for file in folder.iterdir()] == ["mine.txt"]
    (folder / "mine.txt").unlink()
    convert(path, folder, ignore_progress)
    assert {file.name for file in folder.iterdir()} == FILES


def test_a_failed_conversion_leaves_nothing(tmp_path) -> None:
    tiny = make_tiny_model("llama", "f32")
    metadata = {**tiny.metadata, "tokenizer.chat_templates": ["../../evil"], "tokenizer.chat_template.../../evil": "x"}
    path = replace(tiny, metadata=metadata).write(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModel, match="cannot be a file name"):
        convert(path, tmp_path / "dir", ignore_progress)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(InvalidModelFile):
        convert(damaged, tmp_path / "dir", ignore_progress)

    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny.write(tmp_path / "m.gguf"), tmp_path / "dir", stop)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["damaged.gguf", "m.gguf"]
