"""Importance matrices: the mean squares of each matrix's inputs on a text.

llama.cpp's ``imatrix`` writes them as GGUF files; older versions write another format.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidModelFile
from slm_core.gguf import GgmlType, GgufFile
from slm_core.gguf.cursor import Cursor, MappedFile, shown
from slm_core.user_paths import expanded

Importance: TypeAlias = Mapping[str, NDArray[np.float32]]
"""By tensor name: the mean square of each input, float32 [n_matrices * n_cols] (several matrices: experts)."""

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_NAME_BYTES = 65535
_MIN_ENTRY_BYTES = 12


def read_importance(path: str | os.PathLike[str]) -> Importance:
    """Read an importance matrix, of either format.

    Raises:
        InvalidModelFile: it cannot be read, is damaged, or has a negative or NaN value.
        UnsupportedModel: it is a GGUF file of another version.
    """
    file_path = expanded(path)
    matrices: dict[str, NDArray[np.float32]] = {}
    with closing(MappedFile(file_path)) as file:
        is_gguf = bytes(file.data[:4]) == b"GGUF"
        for name, values in _gguf_entries(file_path) if is_gguf else _legacy_entries(Cursor(file)):
            if name in matrices:
                raise InvalidModelFile(f"{file_path}: importance of {shown(name)} appears twice")
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise InvalidModelFile(
                    f"{file_path}: importance of {shown(name)} is negative or not a number in places"
                )
            matrices[name] = values
    if not matrices:
        raise InvalidModelFile(f"{file_path}: no importance in it")
    return matrices


def _gguf_entries(path: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Sums of squares of inputs, a row for each matrix, divided by the number of inputs of each row."""
    with GgufFile.open(path) as file:
        for name in file.tensors:
            if name.endswith(_SUMS):
                stem = name.removesuffix(_SUMS)
                sums, counts = _floats(file, name), _floats(file, stem + _COUNTS)
                if counts.size != len(sums):
                    raise InvalidModelFile(f"{path}: {counts.size} counts for {len(sums)} matrices of {shown(stem)}")
                yield stem, _means(sums, counts.reshape(-1, 1)).reshape(-1)


def _floats(file: GgufFile, name: str) -> NDArray[np.float32]:
    data = file.tensor_data(name)
    tensor = file.tensors[name]
    if tensor.ggml_type is not GgmlType.F32:
        raise InvalidModelFile(f"{file.path}: {shown(name)} is {tensor.ggml_type.name}, but F32 is wanted")
    return np.frombuffer(data, "<f4").astype(np.float32).reshape(-1, tensor.shape[-1])


def _means(sums: NDArray[np.float32], counts: NDArray[np.float32]) -> NDArray[np.float32]:
    """Mean squares; rows without inputs (experts that were never used) have equal values."""
    is_counted = counts > 0
    with np.errstate(over="ignore", invalid="ignore"):
        means: NDArray[np.float32] = np.where(
            is_counted, sums / np.where(is_counted, counts, np.float32(1)), np.float32(1)
        )
    return means


def _legacy_entries(cursor: Cursor) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The entries: name, number of calls, number of values, values. The data after them is ignored."""
    n_entries = cursor.u32("the number of entries")
    if not 0 < n_entries * _MIN_ENTRY_BYTES <= cursor.left:
        raise cursor.damaged(
            f"neither a GGUF file nor an importance matrix: {n_entries} entries in {cursor.size} bytes"
        )
    for i in range(n_entries):
        name = _name(cursor, f"name of entry {i}")
        n_calls = cursor.u32(f"number of calls of {shown(name)}")
        n_values = cursor.u32(f"number of values of {shown(name)}")
        start = cursor.skip(4 * n_values, f"importance of {shown(name)}")
        values = np.frombuffer(cursor.data, "<f4", n_values, start).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # bad values are refused later
            means = values / np.float32(n_calls or 1)
        yield name, means


def _name(cursor: Cursor, what: str) -> str:
    n_bytes = cursor.u32(f"length of the {what}")
    if not 0 < n_bytes <= _MAX_NAME_BYTES:
        raise cursor.damaged(f"neither a GGUF file nor an importance matrix: the {what} has {n_bytes} bytes")
    (raw,) = struct.unpack_from(f"{n_bytes}s", cursor.data, cursor.skip(n_bytes, what))
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        raise cursor.damaged(f"neither a GGUF file nor an importance matrix: the {what} is not text") from None
