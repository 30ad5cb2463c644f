"""A model in memory instead of a file."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

import slm_core as slm
from slm_conformance.oracle.factories import make_tiny_model
from slm_core.errors import InvalidModelFile, ModelClosed, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.types import Pos


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_model("qwen3").write(tmp_path_factory.mktemp("model") / "m.gguf")


def test_bytes_are_read_like_the_file(path):
    data = path.read_bytes()
    with GgufFile.open(path) as file, GgufFile.open(data) as held:
        assert dict(held.tensors) == dict(file.tensors)
        assert held.fingerprint() == file.fingerprint()
        assert list(held.metadata) == list(file.metadata)
        for name in file.tensors:
            tensor_bytes = held.tensor_data(name)
            assert (tensor_bytes == file.tensor_data(name)).all()
            assert np.shares_memory(tensor_bytes, np.frombuffer(data, np.uint8)), "nothing is copied"
    with pytest.raises(ModelClosed):
        held.tensor_data("token_embd.weight")


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
