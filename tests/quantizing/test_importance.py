"""Importance matrices: both formats, missing entries, and invalid files."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from slm_core.errors import InvalidModelFile, InvalidOption, ModelError
from slm_core.gguf import GgufFile
from slm_core.quantizing import plan_quantization, quantize_model, read_importance
from toy_models import importance_for, write_imatrix, write_legacy_imatrix

WRITERS = pytest.mark.parametrize("write", [write_imatrix, write_legacy_imatrix])


def entry(name: bytes, n_calls: int, n_values: int, values: bytes) -> bytes:
    return struct.pack("<i", len(name)) + name + struct.pack("<ii", n_calls, n_values) + values


@WRITERS
def test_importance_is_the_mean_over_the_tokens(toy, tmp_path, write) -> None:
    expected = importance_for(toy(n_experts=4))
    importance = read_importance(write(tmp_path / "i", expected, 8))
    assert set(importance) == set(expected)
    for name, values in expected.items():  # multiplied and divided by 8: exact
        np.testing.assert_array_equal(importance[name], values.reshape(-1))


def test_unused_experts_have_uniform_importance(tmp_path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "i.gguf", "")
    sums = np.array([[2, 6], [0, 0]], np.float32)
    writer.add_tensor("blk.0.ffn_up_exps.weight.in_sum2", sums)
    writer.add_tensor("blk.0.ffn_up_exps.weight.counts", np.array([[2], [0]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_importance(tmp_path / "i.gguf")["blk.0.ffn_up_exps.weight"].tolist() == [1, 3, 1, 1]


def test_both_formats_give_the_same_quantized_file(toy, tmp_path) -> None:
    source = toy()
    importance = importance_for(source)
    for name, write in (("new", write_imatrix), ("old", write_legacy_imatrix)):
        imatrix = write(tmp_path / name, importance, 8)
        quantize_model(source, tmp_path / f"{name}.gguf", "Q4_K_S", imatrix=imatrix)
    quantize_model(source, tmp_path / "plain.gguf", "Q4_K_S")
    assert (tmp_path / "new.gguf").read_bytes() == (tmp_path / "old.gguf").read_bytes()
    assert (tmp_path / "new.gguf").read_bytes() != (tmp_path / "plain.gguf").read_bytes()


def test_tensors_without_importance_are_noted(toy, tmp_path) -> None:
    source = toy(n_layers=2)
    importance = importance_for(source)
    del importance["blk.1.ffn_up.weight"]
    with GgufFile.open(source) as file:
        plan = plan_quantization(file, "Q4_0", imatrix=write_imatrix(tmp_path / "i", importance))
    expected = "no importance of 3 tensors ('token_embd.weight', 'output.weight', 'blk.1.ffn_up.weight')"
    assert plan.notes == (f"{expected}: their errors count alike",)


def test_importance_of_another_model_is_refused(toy, tmp_path) -> None:
    source = toy()
    importance = importance_for(toy("other.gguf", n_cols=512))
    with pytest.raises(InvalidOption, match=r"the importance of 'blk.2.attn_q.weight' has 512 values, but .* 256 col"):
        quantize_model(source, tmp_path / "new.gguf", "Q4_0", imatrix=write_imatrix(tmp_path / "i", importance))
    strange = {f"x.{name}": values for name, values in importance.items()}
    with pytest.raises(InvalidOption, match=r"no importance of any tensor of .*toy.gguf in it"):
        quantize_model(source, tmp_path / "new.gguf", "Q4_0", imatrix=write_imatrix(tmp_path / "s", strange))
    assert not (tmp_path / "new.gguf").exists()


def test_embedding_importance_of_another_size_is_ignored_with_a_note(toy, tmp_path) -> None:
    source = toy()
    importance = importance_for(source) | {"token_embd.weight": np.ones((1, 9), np.float32)}
    plan = quantize_model(source, tmp_path / "new.gguf", "Q4_0", imatrix=write_imatrix(tmp_path / "i", importance))
    assert "token_embd.weight" in plan.notes[0]


@WRITERS
@pytest.mark.parametrize("bad", [-1e-3, np.nan, np.inf])
def test_negative_and_non_finite_importance_is_refused(toy, tmp_path, write, bad) -> None:
    importance = importance_for(toy())
    importance["blk.1.attn_v.weight"][0, 3] = bad
    with pytest.raises(InvalidModelFile, match=r"importance of 'blk.1.attn_v.weight' is negative or not a number"):
        read_importance(write(tmp_path / "i", importance))


@WRITERS
def test_every_truncation_is_refused_in_one_line(tmp_path, write) -> None:
    importance = {"blk.0.attn_q.weight": np.ones((1, 6), np.float32), "b": np.ones((2, 3), np.float32)}
    path = write(tmp_path / "i", importance)
    whole = path.read_bytes()
    n_bytes = len(whole) - 14 if write is write_legacy_imatrix else len(whole) - 24  # optional data at the end, padding
    for n in range(1, n_bytes):
        path.write_bytes(whole[:n])
        with pytest.raises(ModelError) as caught:
            read_importance(path)
        assert str(caught.value).startswith(str(path))
        assert str(caught.value).isprintable()


@WRITERS
def test_changed_bytes_are_refused_or_read(tmp_path, write) -> None:
    path = write(tmp_path / "i", {"blk.0.attn_q.weight": np.ones((1, 6), np.float32)})
    whole = path.read_bytes()
    rng = np.random.default_rng(2)
    for _ in range(600):
        data = bytearray(whole)
        for position in rng.integers(0, len(data), 3):
            data[position] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(256))])
        path.write_bytes(data)
        try:
            importance = read_importance(path)
        except ModelError as error:
            assert str(error).isprintable()
        else:
            assert all(np.isfinite(values).all() and (values >= 0).all() for values in importance.values())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x00\x00\x00\x00", "neither a GGUF file nor an importance matrix: 0 entries"),
        (b"PK\x03\x04" + bytes(50), "neither a GGUF file nor an importance matrix: 67324752 entries"),
        (struct.pack("<ii", 1, -1) + bytes(50), "the name of entry 0 has 4294967295 bytes"),
        (struct.pack("<i", 1) + entry(b"w", 1, -1, bytes(8)), "importance of 'w' needs 17179869180 bytes"),
        (struct.pack("<i", 1) + entry(b"\xff\xfe", 1, 2, bytes(8)), "the name of entry 0 is not text"),
        (struct.pack("<i", 2) + 2 * entry(b"w", 1, 2, bytes(8)), "importance of 'w' appears twice"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "i.dat"
    path.write_bytes(data)
    with pytest.raises(InvalidModelFile, match=message) as refused:
        read_importance(path)
    if sys.platform == "linux":  # Windows cannot replace a mapped file, also while the error is alive
        assert str(path) not in Path("/proc/self/maps").read_text(), refused


def test_gguf_files_without_importance_are_refused(toy, tmp_path) -> None:
    with pytest.raises(InvalidModelFile, match="no importance in it"):
        read_importance(toy())
    with pytest.raises(InvalidModelFile, match="no such file"):
        read_importance(tmp_path / "missing.dat")
