"""Files written tensor by tensor, read by the gguf package; failed writes leave no file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from slm_core.gguf import GgmlType, GgufWriter, NewTensor, stored_uint32

TENSORS = [NewTensor("a", (3, 5), GgmlType.F32, 60), NewTensor("b\u00e9", (2, 3, 32), GgmlType.Q8_0, 204)]
METADATA = {"general.file_type": stored_uint32(7), "x": stored_uint32(2**32 - 1)}


def pieces(rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.integers(0, 120, n).astype(np.uint8) for n in (60, 34, 102, 68)]


def test_the_gguf_package_reads_written_files(tmp_path: Path) -> None:
    writer, data = (
        GgufWriter(METADATA | {"general.alignment": stored_uint32(64)}, TENSORS, 64),
        pieces(np.random.default_rng(0)),
    )
    with writer.open(tmp_path / "m.gguf") as sink:
        for piece in data:
            sink.write(piece)
    assert (tmp_path / "m.gguf").stat().st_size == writer.size_bytes
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["x"].contents() == 2**32 - 1
    tensors = {t.name: (t.shape.tolist(), t.tensor_type.name, np.asarray(t.data).tobytes()) for t in reader.tensors}
    raw = np.concatenate(data).tobytes()
    assert tensors == {"a": ([5, 3], "F32", raw[:60]), "b\u00e9": ([32, 3, 2], "Q8_0", raw[60:])}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([60, 204, 1], "1 bytes, but 0 are left of the tensor"),
        ([61], "61 bytes, but 60 are left of the tensor"),
        ([30, 31], "31 bytes, but 30 are left of the tensor"),
        ([60, 100], "the data of the last tensors is missing"),
        ([60], "the data of the last tensors is missing"),
        ([], "the data of the last tensors is missing"),
    ],
)
def test_data_of_a_wrong_size_keeps_the_old_file(tmp_path: Path, sizes: list[int], message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(ValueError, match=message), GgufWriter(METADATA, TENSORS, 32).open(path) as sink:
        for size in sizes:
            sink.write(np.zeros(size, np.uint8))
    assert path.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [path]
