"""The reader of safetensors files, compared with the safetensors library and tested with wrong bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from slm_core.checkpoints.fp8 import VALUES
from slm_core.checkpoints.safetensors import SafetensorsFile
from slm_core.checkpoints.store import TensorStore
from slm_core.errors import InvalidModelFile, ModelClosed, UnsupportedModel

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


def write_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24)) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_files_of_the_library_are_read(tmp_path):
    tensors = {
        f"{i}.{kind}": (torch.rand(3, i + 1) * 100).to(kind)
        for i, kind in enumerate(TYPES)
    }  # fmt: skip
    tensors["number"] = torch.tensor(3.5)
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert file.tensors[name].shape == tuple(tensor.shape)
        assert file.data(name).tobytes() == tensor.flatten().view(torch.uint8).numpy().tobytes()
    file.close()
    with pytest.raises(ModelClosed):
        file.data("number")


def test_fp8_codes_equal_torch():
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(VALUES, expected)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "not JSON"),
        (b"[1]", b"", "not a JSON object"),
        (b"[" * 20_000, b"", "not JSON"),
        (b'{"a": 1' + b"0" * 9000 + b"}", b"", "not JSON"),
        (b'{"a": {}, "a": {}}', b"", "'a' appears twice"),
        (b'{"\xff": {}}', b"", "not JSON"),
        ({"a": 3}, b"", "does not have just"),
        ({"a": {**entry(), "x": 1}}, bytes(24), "does not have just"),
        ({"a": entry(dtype="F33")}, bytes(24), "of type 'F33'"),
        ({"a": entry(dtype=["F32"])}, bytes(24), "of type"),
        ({"a": entry(shape=(-2, -3))}, bytes(24), "are not sizes"),
        ({"a": entry(shape=(True, 6))}, bytes(24), "are not sizes"),
        ({"a": entry(shape=(2.0, 3))}, bytes(24), "are not sizes"),
        ({"a": entry(shape=(2**40, 2**40))}, bytes(24), "do not hold"),
        ({"a": entry(shape=(2**62, 4))}, bytes(24), "do not hold"),
        ({"a": entry(offsets=(0, 20))}, bytes(24), "do not hold"),
        ({"a": entry(offsets=(24, 0))}, bytes(24), "do not hold"),
        ({"a": entry(offsets=(0, 24, 48))}, bytes(48), "are not sizes"),
        ({"a": entry()}, bytes(23), "truncated"),
        ({"a": entry(), "b": entry(offsets=(20, 44))}, bytes(44), "overlap"),
    ],
)
def test_damage_is_reported_with_its_place_in_one_line(tmp_path, header, data, message):
    with pytest.raises(InvalidModelFile, match=message) as raised:
        SafetensorsFile(write_file(tmp_path / "m.safetensors", header, data))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("length", [3, 2**25 + 1, 2**63, 2**64 - 1])
def test_wrong_lengths_are_refused(tmp_path, length):
    with pytest.raises(InvalidModelFile, match=r"header|JSON"):
        SafetensorsFile(write_file(tmp_path / "m.safetensors", {}, b"", length))
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(InvalidModelFile, match="3 bytes"):
        SafetensorsFile(tmp_path / "short")


def test_a_directory_instead_of_a_file_is_refused(tmp_path):
    with pytest.raises(InvalidModelFile, match="a directory, but a safetensors file is wanted"):
        SafetensorsFile(tmp_path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_bytes_are_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "m.safetensors"
    whole = bytearray(write_file(path, {"a": entry(), "b": entry("BF16", (4,), (24, 32))}, bytes(32)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole[: data.draw(st.integers(1, len(whole)))])
    try:
        file = SafetensorsFile(path)
    except InvalidModelFile:
        return
    for name in file.tensors:
        assert file.data(name).size == file.tensors[name].n_bytes


def sharded(folder: Path, weight_map: object) -> Path:
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.ones(3)}, folder / "two.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}, "'c' is not in"),
        ({"a": "two.safetensors", "b": "two.safetensors"}, "'a' is not in"),
        ({"a": "one.safetensors", "b": "three.safetensors"}, "three.safetensors: no such file"),
        ({"a": "../one.safetensors"}, "not the name of a file"),
        ({"a": "/etc/passwd"}, "not the name of a file"),
        ({"a": 3}, "not the name of a file"),
        ({}, "no 'weight_map'"),
        (["a"], "no 'weight_map'"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path, weight_map, message):
    with pytest.raises(InvalidModelFile, match=message):
        TensorStore(sharded(tmp_path, weight_map))


def test_a_tensor_in_two_files_is_refused(tmp_path):
    folder = sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / "two.safetensors")
    with pytest.raises(InvalidModelFile, match=r"'a' is in one\.safetensors, too"):
        TensorStore(folder)


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({}, InvalidModelFile, "'w_scale_inv' is missing"),
        ({"w_scale": torch.ones(3)}, InvalidModelFile, r"accepted: a matrix, and one scale"),
        ({"w_scale_inv": torch.ones(2, 3)}, InvalidModelFile, r"accepted: a matrix, and one scale"),
        ({"w_scale": torch.ones(1, dtype=torch.int32)}, UnsupportedModel, "of type I32"),
    ],
)
def test_fp8_without_matching_scales_is_refused(tmp_path, tensors, error, message):
    save_file({"w": torch.ones(200, 130).to(torch.float8_e4m3fn), **tensors}, tmp_path / "model.safetensors")
    with pytest.raises(error, match=message):
        TensorStore(tmp_path)


def test_unsupported_types_are_named(tmp_path):
    save_file({"w": torch.ones(2, 3, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"'w' is of type I64 \(accepted: F32, F16, BF16, F8_E4M3\)"):
        TensorStore(tmp_path).ggml_type("w")
