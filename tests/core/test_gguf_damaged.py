"""Damaged, hostile and foreign GGUF files: each raises a typed error of one line, at a bounded cost."""

from __future__ import annotations

import errno
import mmap
import os
import re
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    FLOAT32,
    I8,
    Q2_0,
    Q4_K,
    Q8_0,
    STRING,
    U8,
    UINT32,
    UINT64,
    array,
    assert_is_one_line,
    model,
    pair,
    refusal,
    string,
    tensor,
)
from slm_core.errors import InvalidModelFile, ModelError, ModelFileNotFound, UnsupportedModel
from slm_core.gguf import GgufFile


def nested(depth: int) -> bytes:
    return array(ARRAY, 1) * (depth - 1) + array(U8, 0)


SOUND = model(
    [
        pair("general.architecture", STRING, string("llama")),
        pair("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, string("a") + string("") + string("xyz"))),
        pair("llama.counts", ARRAY, array(UINT32, 2, struct.pack("<2I", 3, 4))),
        pair("llama.nested", ARRAY, array(ARRAY, 2, array(U8, 1, b"\x05") + array(STRING, 1, string("q")))),
        pair("llama.flag", BOOL, b"\x01"),
        pair("llama.base", FLOAT32, struct.pack("<f", 1e4)),
    ],
    [tensor("a", [3, 5], F32, 0), tensor("b", [64, 2], Q8_0, 64), tensor("c", [7], I8, 224)],
    np.random.default_rng(0).integers(1, 256, 231, dtype=np.uint8).tobytes(),
)


def read_everything(path: Path) -> None:
    """Open a file and read everything in it; only a ModelError of one line that names the file may be raised."""
    try:
        with GgufFile.open(path) as file:
            for key in file.metadata:
                file.metadata[key]
                file.metadata.type_name(key)
            for name, info in file.tensors.items():
                assert file.tensor_data(name).nbytes == info.n_bytes
            file.fingerprint()
    except ModelError as error:
        assert_is_one_line(error, path)


def test_the_undamaged_file_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(SOUND)
    file = GgufFile.open(path)
    assert file.require("tokenizer.ggml.tokens", list[str]) == ["a", "", "xyz"]
    assert [tuple(t.shape) for t in file.tensors.values()] == [(5, 3), (2, 64), (7,)]
    expected = {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(path).tensors}
    assert {name: file.tensor_data(name).tobytes() for name in file.tensors} == expected


def test_truncation_at_every_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for n_bytes in range(len(SOUND)):
        kind, message = refusal(path, SOUND[:n_bytes])
        assert kind is InvalidModelFile, f"the first {n_bytes} bytes: {message}"


def test_truncation_at_every_byte_of_a_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocab.gguf"
    vocabulary = model([pair("tokens", ARRAY, array(STRING, 2, string("a") + string("bc")))], alignment=1)
    path.write_bytes(vocabulary)
    assert GgufFile.open(path).require("tokens", list[str]) == ["a", "bc"]
    for n_bytes in range(len(vocabulary)):
        kind, message = refusal(path, vocabulary[:n_bytes])
        assert kind is InvalidModelFile, f"the first {n_bytes} bytes: {message}"


def test_paths_that_are_not_files_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.gguf") == (ModelFileNotFound, f"{tmp_path}/none.gguf: no such file")
    assert refusal(tmp_path) == (InvalidModelFile, f"{tmp_path}: a directory, but a GGUF file is wanted")
    assert refusal(tmp_path / "empty", b"") == (InvalidModelFile, f"{tmp_path}/empty: the file is empty")
    assert refusal(Path("/dev/zero"))[1] == "/dev/zero: not a regular file, but a GGUF file is wanted"
    (tmp_path / "file").touch()
    assert "cannot be read: Not a directory" in refusal(tmp_path / "file" / "model.gguf")[1]
    with pytest.raises(InvalidModelFile, match=r"cannot be read: .*embedded null"):
        GgufFile.open("a\0b.gguf")


@pytest.mark.parametrize("name", ["model.gguf", "model-00001-of-00002.gguf"])
def test_a_refused_file_is_not_held_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Windows neither replaces nor removes a file that is mapped, and errors may live long."""
    maps: list[mmap.mmap] = []

    class Map(mmap.mmap):
        def __init__(self, *args: object, **options: object) -> None:
            maps.append(self)

    monkeypatch.setattr(mmap, "mmap", Map)
    split = model([pair("split.count", UINT32, struct.pack("<I", 2))])
    (tmp_path / name).write_bytes(split if "of" in name else SOUND[:-1])
    with pytest.raises(InvalidModelFile) as error:
        GgufFile.open(tmp_path / name)
    assert maps
    assert all(mapped.closed for mapped in maps), error.traceback


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path / "pipe.gguf")[1]


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)  # file modes would not stop root
    (tmp_path / "secret.gguf").touch()
    path = tmp_path / "secret.gguf"
    assert refusal(path) == (InvalidModelFile, f"{path}: cannot be read: Permission denied")


def test_a_big_endian_file_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("w", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    kind, message = refusal(tmp_path / "model.gguf")
    assert kind is UnsupportedModel
    assert "a big-endian file (accepted: little-endian)" in message


HUGE = 2**63
DAMAGED = {
    "another magic": (model(magic=b"ggjt"), r"not a GGUF file: it starts with b'ggjt', not b'GGUF'"),
    "absurd tensor count": (model(n_tensors=HUGE), r"byte 8: the number of tensors is 9223372036854775808, but"),
    "absurd key count": (
        model(n_pairs=HUGE),
        r"byte 16: the number of metadata keys is 9223372036854775808, but 8 bytes",
    ),
    "one key too many": (
        model([pair("k", U8, b"\0")], n_pairs=2, alignment=1),
        r"byte 16: the number of metadata keys",
    ),
    "one tensor too many": (
        model(tensors=[tensor("w", [4], F32, 0)], data=bytes(32), n_tensors=2),
        r"2 tensors take 96 bytes at least, the file has",
    ),
    "key past the end": (
        model([struct.pack("<Q", 60000) + b"k" * 16]),
        r"metadata key needs 60000 bytes, the file has",
    ),
    "overlong key": (
        model([string("k" * 65536) + bytes(9)]),
        r"byte 24: a metadata key of 65536 bytes \(at most 65535\)",
    ),
    "key that is not UTF-8": (model([pair(b"\xff", U8, b"\0")]), r"byte 24: a metadata key is not valid UTF-8"),
    "duplicate key": (
        model([pair("k\n", U8, b"\0"), pair("k\n", UINT32, bytes(4))]),
        r"byte 39: metadata key 'k\\n' appears twice",
    ),
    "string past the end": (
        model([pair("k", STRING, struct.pack("<Q", HUGE))]),
        r"truncated at byte 45: metadata 'k' needs 9223372036854775808 bytes, the file has 19 left",
    ),
    "string length that wraps": (model([pair("k", STRING, b"\xff" * 8)]), r"needs 18446744073709551615 bytes"),
    "array of absurd length": (
        model([pair("k", ARRAY, array(UINT64, 2**61))]),
        r"byte 41: the number of items of metadata 'k' is 2305843009213693952, but .* each takes 8 at least",
    ),
    "array one byte short": (model([pair("k", ARRAY, array(U8, 2, b"\0"))], alignment=1), r"the number of items"),
    "string array of absurd length": (model([pair("k", ARRAY, array(STRING, 2**61))]), r"each takes 8 at least"),
    "string in an array past the end": (
        model([pair("k", ARRAY, array(STRING, 2, string("a") + struct.pack("<Q", 99)))]),
        r"truncated: the 2 strings of metadata 'k' from byte 49 pass the end of the file",
    ),
    "string in an array of absurd length": (
        model([pair("k", ARRAY, array(STRING, 3, b"\xff" * 8 + bytes(80)))]),
        r"truncated: the 3 strings of metadata 'k'",
    ),
    "array of arrays of absurd length": (model([pair("k", ARRAY, array(ARRAY, 2**59))]), r"each takes 12 at least"),
    "array in an array past the end": (
        model([pair("k", ARRAY, array(ARRAY, 1, array(UINT32, 9)))]),
        r"the number of items",
    ),
    "bool that is neither": (model([pair("k", BOOL, b"\x02")]), r"byte 37: metadata 'k' holds the bool 2"),
    "bool in an array": (
        model([pair("k", ARRAY, array(BOOL, 3, b"\0\1\7"))]),
        r"byte 51: metadata 'k' holds the bool 7",
    ),
    "tensor of no dimensions": (
        model(tensors=[tensor("w", [], F32, 0), bytes(8)], n_tensors=1, data=bytes(32)),
        r"byte 24: tensor 'w' has 0 dimensions \(accepted: 1 to 4\)",
    ),
    "tensor of five dimensions": (
        model(tensors=[tensor("w", [1] * 5, F32, 0)], data=bytes(32)),
        r"tensor 'w' has 5 dim",
    ),
    "tensor of absurd dimensions": (
        model(tensors=[tensor("w", [4], F32, 0, 2**32 - 1)], data=bytes(32)),
        r"has 4294967295 dim",
    ),
    "empty dimension": (
        model(tensors=[tensor("w", [4, 0], F32, 0)], data=bytes(32)),
        r"the impossible dimensions \[4, 0\]",
    ),
    "dimensions that wrap to 0": (
        model(tensors=[tensor("w", [2**32, 2**32], I8, 0)], data=bytes(32)),
        r"impossible dim",
    ),
    "dimensions that wrap to 16": (
        model(tensors=[tensor("w", [2**60 + 1, 16], I8, 0)], data=bytes(32)),
        r"impossible dim",
    ),
    "size that wraps to 0": (
        model(tensors=[tensor("w", [2**62], F32, 0)], data=bytes(32)),
        r"truncated: tensor 'w' is at",
    ),
    "rows of part of a block": (
        model(tensors=[tensor("w", [48, 2], Q8_0, 0)], data=bytes(102)),
        r"tensor 'w' has rows of 48, not a whole number of blocks of 32 \(Q8_0\)",
    ),
    "whole blocks only over rows": (
        model(tensors=[tensor("w", [64, 4], Q4_K, 0)], data=bytes(144)),
        r"rows of 64, not",
    ),
    "misaligned tensor": (
        model(tensors=[tensor("w", [4], F32, 16)], data=bytes(64)),
        r"'w' is at 16, not a multiple of 32",
    ),
    "tensor past the end": (
        model(tensors=[tensor("w", [17], F32, 0)], data=bytes(67)),
        r"truncated: tensor 'w' is at bytes 64 to 132, the file has 131",
    ),
    "tensor far past the end": (
        model(tensors=[tensor("w", [1], F32, 2**64 - 32)], data=bytes(32)),
        r"truncated: tensor 'w'",
    ),
    "overlapping tensors": (
        model(tensors=[tensor("a", [8], F32, 32), tensor("b", [9], F32, 0)], data=bytes(64)),
        r"tensors 'b' \(bytes 96 to 132\) and 'a' \(from byte 128\) overlap",
    ),
    "tensors in one place": (
        model(tensors=[tensor("a", [8], F32, 0), tensor("b", [8], F32, 0)], data=bytes(64)),
        r"overlap",
    ),
    "duplicate tensor": (
        model(tensors=[tensor("a", [8], F32, 0), tensor("a", [8], F32, 32)], data=bytes(64)),
        r"tensor 'a' appears twice",
    ),
    "tensor name that is not UTF-8": (
        model(tensors=[tensor(b"\xff", [8], F32, 0)], data=bytes(32)),
        r"tensor name is not valid",
    ),
    "alignment 0": (
        model([pair("general.alignment", UINT32, bytes(4))]),
        r"metadata 'general.alignment' is 0 \(accepted: pow",
    ),
    "alignment 48": (
        model([pair("general.alignment", UINT32, struct.pack("<I", 48))]),
        r"is 48 \(accepted: powers of two from 8",
    ),
    "alignment 4": (
        model([pair("general.alignment", UINT32, struct.pack("<I", 4))]),
        r"is 4 \(accepted: powers of two from 8",
    ),
    "alignment of 64 bits": (
        model([pair("general.alignment", UINT64, struct.pack("<Q", 32))]),
        r"is uint64, but uint32 is wanted",
    ),
    "alignment in words": (
        model([pair("general.alignment", STRING, string("32"))]),
        r"is string, but uint32 is wanted",
    ),
    "alignment beyond the file": (
        model(
            [pair("general.alignment", UINT32, struct.pack("<I", 2**31))],
            tensors=[tensor("w", [4], F32, 0)],
            data=bytes(64),
        ),
        r"truncated: tensor 'w' is at bytes 2147483648",
    ),
    "shard under another name": (
        model([pair("split.count", UINT32, struct.pack("<I", 2))]),
        r"one of 2 shards .* not named NAME-00001-of-00002.gguf",
    ),
    "shard count of the wrong type": (
        model([pair("split.count", STRING, string("2"))]),
        r"'split.count' is string, but int",
    ),
    "negative shard count": (model([pair("split.count", 5, struct.pack("<i", -2))]), r"metadata 'split.count' is -2"),
}
UNSUPPORTED = {
    "version 1": (model(version=1), r"GGUF version 1 \(accepted: 2, 3\)"),
    "version 4": (model(version=4), r"GGUF version 4 \(accepted: 2, 3\)"),
    "version 0": (model(version=0), r"GGUF version 0 \(accepted: 2, 3\)"),
    "big-endian version 2": (model(version=2 << 24), r"a big-endian file \(accepted: little-endian\)"),
    "big-endian version 1": (model(version=1 << 24), r"a big-endian file \(accepted: little-endian\)"),
    "metadata of an unknown type": (
        model([pair("k", 13, bytes(8))]),
        r"byte 33: metadata 'k' has the unknown type id 13",
    ),
    "array of an unknown type": (
        model([pair("k", ARRAY, array(99, 0))]),
        r"byte 37: metadata 'k' has the unknown type id 99",
    ),
    "arrays nested nine deep": (
        model([pair("k", ARRAY, nested(9))]),
        r"metadata 'k' has arrays nested more than 8 deep",
    ),
    "arrays nested a thousand deep": (model([pair("k", ARRAY, nested(1000))]), r"nested more than 8 deep"),
    "tensor of an unknown type": (
        model(tensors=[tensor("w", [256], 43, 0)], data=bytes(512)),
        r"tensor 'w' has the type id 43 \(unknown here\)",
    ),
    "tensor of a type far off": (
        model(tensors=[tensor("w", [4], 2**32 - 1, 0)], data=bytes(512)),
        r"type id 4294967295 \(unk",
    ),
    "tensor of a withdrawn type": (
        model(tensors=[tensor("w", [32], 31, 0)], data=bytes(32)),
        r"tensor 'w' has the type id 31 \(Q4_0_4_4, which ggml",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    data, pattern = DAMAGED[name]
    kind, message = refusal(tmp_path / "model.gguf", data)
    assert re.search(pattern, message), message
    assert kind is InvalidModelFile, message


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unknown_things_are_named(tmp_path: Path, name: str) -> None:
    data, pattern = UNSUPPORTED[name]
    kind, message = refusal(tmp_path / "model.gguf", data)
    assert re.search(pattern, message), message
    assert kind is UnsupportedModel, message


def test_arrays_nested_eight_deep_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(model([pair("k", ARRAY, nested(8))]))
    value = GgufFile.open(path).metadata["k"]
    for _ in range(7):
        assert isinstance(value, list)
        (value,) = value
    assert isinstance(value, np.ndarray)
    assert value.shape == (0,)


def test_long_and_hostile_names_stay_one_short_line(tmp_path: Path) -> None:
    name = "\n\x1b[2J\u202e" + "x" * 60000
    _, message = refusal(tmp_path / "a.gguf", model([pair(name, BOOL, b"\x09")]))
    assert "xxx'... holds the bool 9" in message
    refusal(tmp_path / "b.gguf", model(tensors=[tensor(name, [3], Q8_0, 0)], data=bytes(64)))


def id_42(n_rows: int, row: int, n_bytes: int, *, last: bool = False) -> bytes:
    n_bytes += 0 if last else -n_bytes % 32
    after = [] if last else [tensor("after", [8], F32, n_bytes)]
    return model(tensors=[tensor("w", [row, n_rows], Q2_0, 0), *after], data=bytes(n_bytes + (0 if last else 32)))


def test_type_id_42_is_q2_0_if_the_size_fits(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    # A small tensor has room for both layouts; rows of 192 are not a multiple of the forks' 128.
    for n_rows, row, last in ((24, 256, False), (24, 256, True), (1, 192, False)):
        n_bytes = n_rows * row // 64 * 18
        path.write_bytes(id_42(n_rows, row, n_bytes, last=last))
        info = GgufFile.open(path).tensors["w"]
        assert (info.ggml_type.name, info.n_bytes, info.shape) == ("Q2_0", n_bytes, (n_rows, row))


@pytest.mark.parametrize(
    ("name", "data"),
    {
        "a fork's 34 bytes for 128 weights": id_42(24, 256, 24 * 256 // 128 * 34),
        "the same, at the end of the file": id_42(24, 256, 24 * 256 // 128 * 34, last=True),
        "too small to tell": id_42(1, 128, 64),
        "room for neither": id_42(24, 256, 24 * 256 // 64 * 18 + 32),
    }.items(),
)
def test_type_id_42_is_refused_if_it_is_ambiguous(tmp_path: Path, name: str, data: bytes) -> None:
    kind, message = refusal(tmp_path / "model.gguf", data)
    assert kind is UnsupportedModel, f"{name}: {message}"
    assert re.search(r"tensor 'w' has the type id 42 and \d+ bytes for \d+ weights, which is not certainly", message)


HOSTILE = {
    "many keys": model([pair(f"{i:x}", BOOL, b"\1") for i in range(5_000)]),
    "many tensors": model(tensors=[tensor(f"{i:x}", [1], I8, 32 * i) for i in range(3_000)], data=bytes(96_000)),
    "tensors without data": model(tensors=[tensor(f"{i:x}", [1], I8, 32 * i) for i in range(3_000)]),
    "empty strings": model([pair("k", ARRAY, array(STRING, 100_000, bytes(800_000)))]),
    "empty arrays": model([pair("k", ARRAY, array(ARRAY, 10_000, bytes(120_000)))]),
    "counts": model(n_tensors=2**40, n_pairs=2**40),
    "array of 2**56 numbers": model([pair("k", ARRAY, array(UINT64, 2**56))]),
    "a long string": model([pair("k", STRING, string(b"\xff" * 1_000_000))]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_memory_stays_within_a_small_multiple_of_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE[name])
    tracemalloc.start()
    try:
        read_everything(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The worst case: for each 12 bytes of file, an array object of 240 bytes and its place in a list.
    assert peak < 24 * len(HOSTILE[name]) + 50_000, f"{peak} bytes for a file of {len(HOSTILE[name])}"


def test_millions_of_strings_are_refused_without_reading_them(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    n = 2**23 + 1
    path.write_bytes(model([pair("k", ARRAY, array(STRING, n))]))
    os.truncate(path, 8 * n + 100)  # a sparse file of empty strings
    kind, message = refusal(path)
    assert kind is UnsupportedModel
    assert "more than 8388608 strings and arrays in the metadata (at metadata 'k')" in message


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.gguf"


FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_random_changed_bytes(scratch: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(SOUND)
    for place, value in changes:
        data[place] = value
    scratch.write_bytes(data)
    read_everything(scratch)


@FUZZ
@given(
    start=st.integers(0, len(SOUND)),
    length=st.integers(0, 80),
    inserted=st.binary(max_size=40),
    end=st.integers(0, 900),
)
def test_random_removed_inserted_and_truncated_pieces(
    scratch: Path, start: int, length: int, inserted: bytes, end: int
) -> None:
    scratch.write_bytes((SOUND[:start] + inserted + SOUND[start + length :])[:end])
    read_everything(scratch)


EXTREME = st.sampled_from([0, 1, 2, 3, 7, 8, 31, 32, 255, 2**16, 2**31, 2**32 - 1])
EXTREME_64 = EXTREME | st.sampled_from([2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
NAMES = st.binary(max_size=4) | st.sampled_from([b"general.alignment", b"split.count", b"split.no", b"w"])
KINDS = st.integers(0, 13)


def arrays(children: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    items = st.lists(children, max_size=4)
    honest = st.tuples(KINDS, items).map(lambda fields: array(fields[0], len(fields[1]), b"".join(fields[1])))
    return honest | st.tuples(KINDS, EXTREME_64, items).map(
        lambda fields: array(fields[0], fields[1], b"".join(fields[2]))
    )


VALUES = st.recursive(st.binary(max_size=9) | st.binary(max_size=5).map(string), arrays, max_leaves=8)
PAIRS = st.tuples(NAMES, KINDS | EXTREME, VALUES).map(lambda fields: pair(*fields))
TENSORS = st.tuples(
    NAMES, st.lists(st.integers(1, 64) | EXTREME_64, max_size=5), st.integers(0, 43) | EXTREME, EXTREME_64
).map(lambda fields: tensor(*fields))


@FUZZ
@given(
    pairs=st.lists(PAIRS, max_size=4),
    tensors=st.lists(TENSORS, max_size=4),
    data=st.binary(max_size=200),
    n_pairs=st.none() | EXTREME_64,
    n_tensors=st.none() | EXTREME_64,
    version=st.sampled_from([2, 3, 3, 3]) | EXTREME,
)
@example(pairs=[], tensors=[], data=b"", n_pairs=None, n_tensors=None, version=3)
def test_random_headers(
    scratch: Path,
    pairs: list[bytes],
    tensors: list[bytes],
    data: bytes,
    n_pairs: int | None,
    n_tensors: int | None,
    version: int,
) -> None:
    scratch.write_bytes(model(pairs, tensors, data, n_pairs=n_pairs, n_tensors=n_tensors, version=version))
    read_everything(scratch)


@FUZZ
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes(scratch: Path, data: bytes, with_header: bool) -> None:
    scratch.write_bytes((b"GGUF\x03\0\0\0" if with_header else b"") + data)
    read_everything(scratch)
