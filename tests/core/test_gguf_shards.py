"""Sharded GGUF files: all shards are read, or the error names the wrong shard."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_bytes import F32, UINT32, assert_is_one_line, model, pair, refusal, tensor
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgufFile


def write_shards(folder: Path, **changes: dict[str, object]) -> list[Path]:
    """Three shards with one tensor each; ``changes`` of a shard are its split keys, ``name`` and ``alignment``."""
    paths = []
    for i in range(3):
        keys: dict[str, object] = {"no": i, "count": 3, "tensors.count": 3, **changes.get(f"shard{i}", {})}
        name = keys.pop("name", f"t{i}")
        pairs = [
            pair(f"split.{key}", UINT32, struct.pack("<I", value)) for key, value in keys.items() if value is not None
        ]
        paths.append(folder / f"model-{i + 1:05}-of-00003.gguf")
        paths[-1].write_bytes(model(pairs, [tensor(str(name), [4], F32, 0)], struct.pack("<4f", *range(i, i + 4))))
    return paths


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    assert len(GgufFile.open(paths[2]).tensors) == 3
    paths[1].unlink()
    for path in (paths[0], paths[2]):
        kind, message = refusal(path)
        assert kind is InvalidModelFile
        assert "1 of 3 shards are missing in its folder, the first is model-00002-of-00003.gguf" in message


def test_a_shard_with_another_count_in_its_name_is_refused(tmp_path: Path) -> None:
    path = write_shards(tmp_path)[0].rename(tmp_path / "model-00001-of-00004.gguf")
    kind, message = refusal(path)
    assert kind is InvalidModelFile
    assert "one of 3 shards (metadata 'split.count'), but not named NAME-00001-of-00003.gguf" in message


@pytest.mark.parametrize(
    ("changes", "which", "pattern"),
    [
        ({"shard1": {"no": 2}}, 1, r"metadata 'split.no' is 2, but by its name it is 1"),
        ({"shard2": {"count": 4}}, 2, r"metadata 'split.count' is 4, but by its name it is 3"),
        ({"shard1": {"name": "t0"}}, 1, r"tensor 't0' appears twice"),
        ({"shard0": {"tensors.count": 4}}, 0, r"metadata 'split.tensors.count' is 4, but the shards hold 3 tensors"),
    ],
)
def test_shards_that_disagree_are_refused(
    tmp_path: Path, changes: dict[str, dict[str, object]], which: int, pattern: str
) -> None:
    paths = write_shards(tmp_path, **changes)
    with pytest.raises(InvalidModelFile, match=pattern) as caught:
        GgufFile.open(paths[0])
    assert_is_one_line(caught.value, paths[which])


@pytest.mark.parametrize("key", ["no", "tensors.count"])
def test_a_shard_without_its_keys_is_refused(tmp_path: Path, key: str) -> None:
    paths = write_shards(tmp_path, shard0={key: None})
    with pytest.raises(UnsupportedModel, match=rf"00001-of-00003\.gguf: metadata 'split\.{key}' is missing"):
        GgufFile.open(paths[1])


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    with pytest.raises(InvalidModelFile, match="truncated: tensor 't2'") as caught:
        GgufFile.open(paths[0])
    assert_is_one_line(caught.value, paths[2])


def test_shards_with_an_ambiguous_start_of_data_are_refused(tmp_path: Path) -> None:
    # The gguf package writes all shards with alignment 64, but only the first says so; its reader then reads zeros.
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    writer.add_custom_alignment(64)
    for i in range(5):
        writer.add_tensor(f"t{i}", np.arange(1, 8 + i, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    third = tmp_path / "model-00003-of-00003.gguf"
    assert gguf.GGUFReader(third).tensors[0].data[0] == 0, "the gguf package now writes or reads such shards correctly"
    with pytest.raises(
        UnsupportedModel, match=r"the start of the tensors is not certain: metadata 'general\.alignment' is 64"
    ):
        GgufFile.open(third)
