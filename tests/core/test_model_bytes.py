"""A model in memory instead of a file."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

import slm_core as slm
from slm_conformance.oracle.factories import make_tiny_model
from slm_core.errors import InvalidModelFile, InvalidOption, ModelClosed, UnsupportedModel
from slm_core.gguf import GgmlType, GgufFile
from slm_core.quantizing import model_bytes
from slm_core.types import Pos


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_model("qwen3").write(tmp_path_factory.mktemp("model") / "m.gguf")


def test_bytes_are_read_like_the_file(path):
    data = path.read_bytes()
    with GgufFile.open(path) as file, GgufFile.open(data) as from_bytes:
        assert dict(from_bytes.tensors) == dict(file.tensors)
        assert from_bytes.fingerprint() == file.fingerprint()
        assert list(from_bytes.metadata) == list(file.metadata)
        for name in file.tensors:
            tensor_bytes = from_bytes.tensor_data(name)
            assert (tensor_bytes == file.tensor_data(name)).all()
            assert np.shares_memory(tensor_bytes, np.frombuffer(data, np.uint8)), "nothing is copied"
    with pytest.raises(ModelClosed):
        from_bytes.tensor_data("token_embd.weight")


@pytest.mark.parametrize(("backend", "options"), [("native", {"tier": "reference"}), ("llamacpp", {}), ("onnx", {})])
def test_a_model_loads_from_memory(path, backend, options):
    rows = []
    for source in (path, path.read_bytes()):
        with slm.load(source, backend=backend, **options) as model, model.new_context(n_ctx=32) as context:
            batch = context.new_batch()
            batch.extend(range(10), Pos(0, 0), logits="all")
            rows.append(context.decode(batch).copy())
            fingerprint = model.info.fingerprint
    assert (rows[0] == rows[1]).all()
    with GgufFile.open(path) as file:
        assert fingerprint == file.fingerprint()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists a process's files")
def test_llama_cpp_frees_the_file_of_bytes(path):
    data, before = path.read_bytes(), n_files_in_memory()
    for _ in range(3):
        slm.load(data, backend="llamacpp").close()
        with pytest.raises(InvalidModelFile):
            slm.load(data[:-2000], backend="llamacpp")
    model = slm.load(data, backend="llamacpp")
    assert (model.info.path.name, n_files_in_memory()) == ("<bytes>", before + 1)
    with slm.load(path, backend="llamacpp") as file:
        tokens = np.arange(4, dtype=np.int32)
        assert (model.model.table_rows(tokens) == file.model.table_rows(tokens)).all()
    del model  # without close
    gc.collect()
    assert n_files_in_memory() == before


def n_files_in_memory():
    """Open files of this process that have no folder."""
    links = Path("/proc/self/fd").iterdir()
    return sum("memfd:model.gguf" in str(link.readlink()) for link in links if link.is_symlink() and link.exists())


@pytest.mark.parametrize("data", [b"", b"GGU", b"no model\n" * 20])
def test_invalid_bytes_are_refused_in_one_line(data):
    with pytest.raises(InvalidModelFile, match="<bytes>"):
        slm.load(data)


def test_a_shard_in_memory_is_refused(tmp_path):
    tiny = make_tiny_model("qwen3")
    tiny.metadata["split.count"] = 2
    with pytest.raises(UnsupportedModel, match="one of 2 shards"):
        slm.load(tiny.write(tmp_path / "m.gguf").read_bytes())


def test_a_model_of_arrays_is_the_file_of_the_same_numbers(path):
    with GgufFile.open(path) as file:
        metadata = {key: file.metadata.stored(key) for key in file.metadata}
        arrays = {}
        for name, tensor in file.tensors.items():
            assert tensor.ggml_type is GgmlType.F32
            arrays[name] = file.tensor_data(name).view(np.float32).reshape(tensor.shape)
        data = model_bytes(metadata, arrays)
        with GgufFile.open(data) as from_arrays:
            assert from_arrays.fingerprint() == file.fingerprint()
    name = "blk.0.ffn_down.weight"
    quantized = model_bytes(metadata, {**arrays, name: (arrays[name], GgmlType.Q8_0)})
    with GgufFile.open(quantized) as from_arrays:
        assert from_arrays.tensors[name].ggml_type is GgmlType.Q8_0
        stored = from_arrays.tensor_data(name)
    # Q8_0: a float16 scale for each 32 weights, the largest magnitude over 127. A code errs by half a step, and the
    # scale by 2 ** -11 of itself, which is up to 127 * 2 ** -11 steps.
    blocks = arrays[name].reshape(-1, 32)
    scales = stored.reshape(-1, 34)[:, :2].copy().view(np.float16).astype(np.float32)
    codes = stored.reshape(-1, 34)[:, 2:].view(np.int8)
    assert (np.abs(scales * codes - blocks) <= 0.57 * np.abs(blocks).max(axis=1, keepdims=True) / 127).all()
    with slm.load(quantized, backend="native") as model:
        assert model.info.n_layers == 3


@pytest.mark.parametrize(
    "weights",
    [np.zeros((2, 2)), np.zeros((0, 4), np.float32), [[1.0]], np.float32(1), (np.zeros(4, int), GgmlType.F32)],
)
def test_arrays_of_other_kinds_are_refused(weights):
    with pytest.raises(InvalidOption, match=r"'x\.weight'"):
        model_bytes({}, {"x.weight": weights})
    with pytest.raises(InvalidOption, match="alignment"):
        model_bytes({"general.alignment": 64}, {})
    with pytest.raises(InvalidModelFile):
        model_bytes({}, {"x": (np.zeros((2, 31), np.float32), GgmlType.Q8_0)})
