"""A model in memory instead of a file."""

from __future__ import annotations

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


def test_a_model_loads_from_memory(path):
    rows = []
    for source in (path, path.read_bytes()):
        with slm.load(source, backend="native", tier="reference") as model, model.new_context(n_ctx=32) as context:
            batch = context.new_batch()
            batch.extend(range(10), Pos(0, 0), logits="all")
            rows.append(context.decode(batch).copy())
            fingerprint = model.info.fingerprint
    assert (rows[0] == rows[1]).all()
    with GgufFile.open(path) as file:
        assert fingerprint == file.fingerprint()


def test_a_backend_that_only_reads_files_refuses_bytes(path):
    pytest.importorskip("llama_cpp")
    data = path.read_bytes()
    with pytest.raises(UnsupportedModel, match=r"bytes in memory: llama\.cpp reads models from files alone"):
        slm.load(data, backend="llamacpp")
    with slm.load(data) as model:
        assert "files alone" in model.info.reason


@pytest.mark.parametrize("data", [b"", b"GGU", b"no model\n" * 20])
def test_invalid_bytes_are_refused_in_one_line(data):
    with pytest.raises(InvalidModelFile, match="<bytes>"):
        slm.load(data)


def test_a_shard_in_memory_is_refused(tmp_path):
    tiny = make_tiny_model("qwen3")
    tiny.metadata["split.count"] = 2
    with pytest.raises(UnsupportedModel, match="one of 2 shards"):
        slm.load(tiny.write(tmp_path / "m.gguf").read_bytes())
