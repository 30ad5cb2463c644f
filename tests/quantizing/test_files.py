"""Quantized files: readable by llama.cpp and the gguf package; after a failure there is no file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from ggml_library import ggml_quantize, llama_quantize
from slm_core.errors import InvalidModelFile, InvalidOption, UnsupportedModel
from slm_core.gguf import GgmlType, GgufFile
from slm_core.quant import quantize
from slm_core.quantizing import RECIPES, plan_quantization, quantize_model, read_importance, write_plan
from toy_models import write_imatrix

CHANGED_KEYS = {"general.file_type", "general.quantization_version"}


def contents(path: Path) -> dict[str, bytes]:
    """The bytes of every tensor, read by the gguf package."""
    return {tensor.name: np.asarray(tensor.data).tobytes() for tensor in gguf.GGUFReader(path).tensors}


def folder(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_files_of_fixed_types_equal_those_of_llama_cpp(toy, tmp_path, name) -> None:
    """The output matrix in Q6_K differs, because its codes are found by a search: only its type and size are equal."""
    source = toy(n_layers=4)
    ours, theirs = tmp_path / "ours.gguf", llama_quantize(source, tmp_path / "t.gguf", RECIPES[name].file_type)
    quantize_model(source, ours, name)
    actual, expected = contents(ours), contents(theirs)
    assert {key: len(data) for key, data in actual.items()} == {key: len(data) for key, data in expected.items()}
    different = [key for key, data in actual.items() if data != expected[key]]
    assert different == ([] if name in ("Q8_0", "F16", "BF16") else ["output.weight"])


def test_metadata_and_floats_are_copied_byte_for_byte(toy, tmp_path) -> None:
    source, target = toy(), tmp_path / "new.gguf"
    quantize_model(source, target, "Q4_K_M")
    with GgufFile.open(source) as before, GgufFile.open(target) as after:
        assert set(after.metadata) == set(before.metadata) | CHANGED_KEYS
        assert list(after.tensors) == list(before.tensors)
        for key in set(before.metadata) - CHANGED_KEYS:
            assert after.metadata.stored(key) == before.metadata.stored(key), key
        assert after.require("general.file_type", int) == 15
        assert after.metadata.type_name("general.file_type") == "uint32"
        assert after.require("general.quantization_version", int) == 2
        for name in ("output_norm.weight", "blk.0.attn_norm.weight"):
            assert bytes(after.tensor_data(name)) == bytes(before.tensor_data(name))
    fields = gguf.GGUFReader(target).fields
    assert fields["general.name"].contents() == "a toy: \u00e9\u4e2d"
    assert fields["toy.array"].contents() == [1.5, 2.5]


@pytest.mark.parametrize("alignment", [64, 4096])
def test_alignment_is_kept(toy, tmp_path, alignment) -> None:
    source, target = toy(alignment=alignment), tmp_path / "new.gguf"
    quantize_model(source, target, "Q8_0")
    reader = gguf.GGUFReader(target)
    assert reader.alignment == alignment
    assert all(tensor.data_offset % alignment == 0 for tensor in reader.tensors)
    assert target.stat().st_size == quantize_size(source, "Q8_0")


def quantize_size(source: Path, name: str) -> int:
    with GgufFile.open(source) as file:
        return plan_quantization(file, name).writer().size_bytes


@pytest.mark.parametrize("name", RECIPES)
def test_the_size_is_known_in_advance(toy, tmp_path, name) -> None:
    source, target = toy(n_layers=2), tmp_path / "new.gguf"
    quantize_model(source, target, name)
    assert target.stat().st_size == quantize_size(source, name)
    with GgufFile.open(target) as file:
        assert file.size_bytes == quantize_size(source, name)


def test_shards_become_one_file(toy, tmp_path) -> None:
    source, first = toy(n_layers=4), toy("split.gguf", n_layers=4, shard_tensors=5)
    quantize_model(source, tmp_path / "a.gguf", "Q8_0")
    quantize_model(first, tmp_path / "b.gguf", "Q8_0")
    assert "-00001-of-" in first.name
    assert contents(tmp_path / "a.gguf") == contents(tmp_path / "b.gguf")
    with GgufFile.open(tmp_path / "b.gguf") as file:
        assert not [key for key in file.metadata if key.startswith("split.")]


def test_quantizing_a_quantized_model_warns(toy, tmp_path) -> None:
    source, middle, last = toy(), tmp_path / "q8.gguf", tmp_path / "q4.gguf"
    assert quantize_model(source, middle, "Q8_0").notes == ()
    plan = quantize_model(middle, last, "Q4_0", pure=True)
    (note,) = plan.notes
    # Three layers with seven matrices each, the embeddings and the output matrix.
    assert note.startswith(
        "23 tensors are quantized already ('token_embd.weight', 'output.weight', 'blk.2.attn_q.weight', ...)"
    )
    llama_quantize(middle, tmp_path / "theirs.gguf", 2, pure=True)
    assert contents(last) == contents(tmp_path / "theirs.gguf")


def test_a_model_that_already_has_the_type_is_copied_with_a_note(toy, tmp_path) -> None:
    source, same = toy(), tmp_path / "same.gguf"
    quantize_model(source, tmp_path / "q8.gguf", "Q8_0")
    plan = quantize_model(tmp_path / "q8.gguf", same, "Q8_0")
    assert plan.notes == ("every tensor has its type already: the new file is a copy",)
    assert contents(same) == contents(tmp_path / "q8.gguf")


@pytest.mark.parametrize("n_threads", [1, 2, 7])
def test_the_file_does_not_depend_on_the_number_of_threads(toy, tmp_path, n_threads) -> None:
    source = toy(n_layers=5, extra={"blk.0.large.weight": (3000, 512)})
    quantize_model(source, tmp_path / "a.gguf", "Q4_K_M", n_threads=n_threads)
    quantize_model(source, tmp_path / "b.gguf", "Q4_K_M")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_each_expert_has_its_own_importance(toy, tmp_path, imatrix_of) -> None:
    source, target = toy(n_experts=4, n_layers=1), tmp_path / "new.gguf"
    importance, file = imatrix_of(source)
    quantize_model(source, target, "Q4_0", imatrix=file)
    name = "blk.0.ffn_down_exps.weight"
    weights = np.asarray(next(t.data for t in gguf.GGUFReader(source).tensors if t.name == name))
    counts = importance[name]
    assert counts.shape == (4, 512)
    with GgufFile.open(target) as new:
        ggml_type = new.tensors[name].ggml_type
        restored = dequantized(new, name)
    theirs = [ggml_quantize(matrix, ggml_type, c) for matrix, c in zip(weights, counts, strict=True)]
    raw = np.stack(theirs).reshape(12, -1)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(ggml_type)).reshape(weights.shape)
    ours = np.sqrt((counts[:, None] * (restored - weights) ** 2).mean())
    assert ours <= 1.02 * np.sqrt((counts[:, None] * (expected - weights) ** 2).mean())
    # The importance of another expert would lose most of the gain.
    swapped = tmp_path / "swapped.gguf"
    file = write_imatrix(tmp_path / "s.gguf", importance | {name: counts[::-1].copy()})
    quantize_model(source, swapped, "Q4_0", imatrix=file)
    with GgufFile.open(swapped) as new:
        wrong = np.sqrt((counts[:, None] * (dequantized(new, name) - weights) ** 2).mean())
    assert wrong > 1.1 * ours


def dequantized(file: GgufFile, name: str) -> np.ndarray:
    tensor = file.tensors[name]
    rows = file.tensor_data(name).reshape(*tensor.shape[:-1], -1)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(tensor.ggml_type)).reshape(tensor.shape)


def test_long_rows_are_quantized_in_pieces(tmp_path) -> None:
    """Two experts with two rows each that are longer than a piece; each expert has its own importance."""
    n_cols = (1 << 18) + 96
    weights = np.random.default_rng(4).standard_normal((2, 2, n_cols)).astype(np.float32)
    counts = np.random.default_rng(5).gamma(0.5, 1, (2, n_cols)).astype(np.float32)
    source = tmp_path / "long.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_tensor("blk.0.ffn_up_exps.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    imatrix = write_imatrix(tmp_path / "imatrix.gguf", {"blk.0.ffn_up_exps.weight": counts}, 8)
    shares: list[float] = []
    quantize_model(source, tmp_path / "new.gguf", "Q5_0", imatrix=imatrix, progress=shares.append)
    expected = [quantize(matrix, GgmlType.Q5_0, row) for matrix, row in zip(weights, counts, strict=True)]
    assert contents(tmp_path / "new.gguf")["blk.0.ffn_up_exps.weight"] == np.concatenate(expected).tobytes()
    assert len(shares) == 8


def test_impossible_targets_are_refused(toy, tmp_path) -> None:
    source, link = toy(), tmp_path / "link.gguf"
    link.symlink_to(source)
    for target, message in (
        (source, "the new file cannot be the one that is read"),
        (link, "the new file cannot be the one that is read"),
        (tmp_path, "not a file"),
        (tmp_path / "no" / "new.gguf", f"there is no folder {tmp_path / 'no'}"),
    ):
        for force in (False, True):
            with pytest.raises(InvalidOption, match=message):
                quantize_model(source, target, "Q8_0", force=force)
    with pytest.raises(InvalidOption, match=r"n_threads is 0 \(accepted: 1 or more\)"):
        quantize_model(source, tmp_path / "new.gguf", "Q8_0", n_threads=0)
    assert folder(source) == ["link.gguf", "toy.gguf"]


def test_existing_files_are_replaced_only_with_force(toy, tmp_path) -> None:
    source, existing = toy(), tmp_path / "there.gguf"
    existing.write_bytes(b"precious")
    with pytest.raises(InvalidOption, match="there is a file already"):
        quantize_model(source, existing, "Q8_0")
    with pytest.raises(InvalidOption, match="unknown type"):
        quantize_model(source, existing, "Q8", force=True)
    assert existing.read_bytes() == b"precious"
    quantize_model(source, existing, "Q8_0", force=True)
    assert contents(existing)
    assert folder(source) == ["there.gguf", "toy.gguf"]


def test_home_directories_are_expanded(toy, tmp_path, monkeypatch) -> None:
    source = toy()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write_imatrix(tmp_path / "imatrix.gguf", {"blk.0.ffn_up.weight": np.ones((1, 32), np.float32)}, 8)
    assert [*read_importance("~/imatrix.gguf")] == ["blk.0.ffn_up.weight"]
    quantize_model(source, "~/new.gguf", "Q8_0")
    assert contents(tmp_path / "new.gguf")


def test_too_little_disk_space_is_reported_before_writing(toy, tmp_path, monkeypatch) -> None:
    source = toy()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InvalidOption, match=r"0 MB are needed, and 0 MB free in its folder"):
        quantize_model(source, tmp_path / "new.gguf", "Q8_0")
    assert folder(source) == ["toy.gguf"]


def test_a_full_disk_leaves_no_file(toy, tmp_path) -> None:
    """A limit on the size of files simulates a full disk."""
    source = toy(n_layers=20)
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000));"
        "from slm_core.quantizing import quantize_model; quantize_model(*sys.argv[1:])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "new.gguf"), "Q8_0"], capture_output=True, text=True
    )
    assert "File too large" in process.stderr
    assert folder(source) == ["toy.gguf"]


def test_an_exception_in_progress_stops_quantization(toy, tmp_path) -> None:
    source, reported = toy(n_layers=4), []

    def stop(share: float) -> None:
        reported.append(share)
        if share > 0.5:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        quantize_model(source, tmp_path / "new.gguf", "Q8_0", progress=stop)
    assert folder(source) == ["toy.gguf"]
    assert reported == sorted(reported)
    assert len(reported) > 3

    shares: list[float] = []
    quantize_model(source, tmp_path / "new.gguf", "Q8_0", progress=shares.append)
    assert shares[-1] == 1.0


def test_ctrl_c_leaves_no_file(toy, tmp_path) -> None:
    source = toy(extra={"blk.0.large.weight": (60000, 512)})
    command = [sys.executable, "-c", "from slm_core.cli import main; main()", "quantize", str(source)]
    running = subprocess.Popen([*command, str(tmp_path / "new.gguf"), "--type", "Q4_K_M"], stderr=subprocess.PIPE)
    parts: list[Path] = []
    deadline = time.monotonic() + 60
    while not parts and running.poll() is None and time.monotonic() < deadline:
        parts = list(tmp_path.glob(".new.gguf.*.part"))
        os.sched_yield()
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert parts, errors.decode()
    assert running.returncode == 130, errors.decode()
    assert folder(source) == ["toy.gguf"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinite_weights_are_refused_by_name(toy, tmp_path, bad) -> None:
    source = toy()
    data = bytearray(source.read_bytes())
    with GgufFile.open(source) as file:
        offset = file.tensors["blk.1.ffn_up.weight"].offset
    data[offset : offset + 4] = np.float32(bad).tobytes()
    source.write_bytes(data)
    with pytest.raises(InvalidModelFile, match=r"tensor 'blk\.1\.ffn_up\.weight': 1 weights are infinite or not a num"):
        quantize_model(source, tmp_path / "new.gguf", "Q4_0")
    assert folder(source) == ["toy.gguf"]


def test_files_without_matrices_are_refused(tmp_path, imatrix_of, toy, shared_dir) -> None:
    _, imatrix = imatrix_of(toy())
    vocabulary = shared_dir / "oracles" / "vocabs" / "ggml-vocab-gpt-2.gguf"
    for source in (vocabulary, imatrix):
        with pytest.raises(UnsupportedModel, match="no matrix in it that could be quantized"):
            quantize_model(source, tmp_path / "new.gguf", "Q4_0")


def test_a_plan_writes_nothing(toy, tmp_path) -> None:
    source = toy()
    with GgufFile.open(source) as file:
        plan = plan_quantization(file, "Q4_0")
        assert folder(source) == ["toy.gguf"]
        write_plan(plan, tmp_path / "new.gguf")
    assert {t.ggml_type for t in plan.tensors} == {GgmlType.F32, GgmlType.Q4_0, GgmlType.Q6_K}
