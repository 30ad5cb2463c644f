"""Files of the safetensors format, mapped: a header of JSON, then the tensors' bytes.

The format is described at https://github.com/huggingface/safetensors; files that violate it are refused.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidModelFile
from slm_core.gguf.cursor import MappedFile, shown
from slm_core.lfs import LONGEST, refuse_pointer

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
"""The number formats with whole bytes per item."""

_LENGTH_BYTES = 8
_MAX_HEADER = 32 << 20  # ten times the largest published header; the format's limit is 100 MB
_MAX_ELEMENTS = 2**63 - 1
_ENTRY = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
        dtype: the number format in the file ("BF16").
        shape: rows first; () for a number.
        start: the offset of its bytes in the file.
        n_bytes: the number of its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int


class SafetensorsFile:
    """One file; opening it reads and checks only the header.

    Args:
        path: the file.

    Attributes:
        path: its path.
        tensors: the tensors by name.

    Raises:
        InvalidModelFile: the file cannot be read, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path, "a safetensors file")
        entries, data_start = self._header()
        self.tensors = {name: self._stored(name, entry, data_start) for name, entry in entries.items()}
        self._check_places()

    def data(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes, uint8 [n_bytes], read-only, shared with the mapping.

        Raises:
            ModelClosed: after ``close()``.
        """
        tensor = self.tensors[name]
        return self._file.view(tensor.start, tensor.n_bytes)

    def close(self) -> None:
        """Release the mapping. A second call does nothing."""
        self._file.close()

    def _header(self) -> tuple[dict[str, Any], int]:
        size = self._file.size
        if size < _LENGTH_BYTES:
            raise self._damaged(f"not a safetensors file: it has {size} bytes")
        refuse_pointer(self.path, bytes(self._file.data[:LONGEST]))
        length = int.from_bytes(self._file.data[:_LENGTH_BYTES], "little")
        if length > min(_MAX_HEADER, size - _LENGTH_BYTES):
            raise self._damaged(
                f"not a safetensors file, or truncated: its header should have {length} bytes, the file has {size}"
                f" (accepted: up to {_MAX_HEADER})"
            )
        end = _LENGTH_BYTES + length
        try:
            header = json.loads(self._file.data[_LENGTH_BYTES:end].decode(), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"the header is not JSON: {str(error)[:200]}") from None
        if not isinstance(header, dict):
            raise self._damaged("the header is not a JSON object")
        header.pop("__metadata__", None)
        return header, end

    def _stored(self, name: str, entry: object, data_start: int) -> StoredTensor:
        what = f"tensor {shown(name)}"
        if not isinstance(entry, dict) or entry.keys() != _ENTRY:
            raise self._damaged(f"{what} does not have just {', '.join(sorted(_ENTRY))}")
        dtype, shape, offsets = (entry[key] for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise self._damaged(f"{what} is of type {str(dtype)[:40]!r} (accepted: {', '.join(ITEM_BYTES)})")
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
            raise self._damaged(f"{what} has a shape or offsets that are not sizes")
        start, stop = offsets
        n_elements = math.prod(shape)
        if n_elements > _MAX_ELEMENTS or stop - start != n_elements * ITEM_BYTES[dtype]:
            raise self._damaged(f"{what} has bytes {start} to {stop}, which do not hold {shape} of {dtype}"[:300])
        if data_start + stop > self._file.size:
            raise self._damaged(
                f"truncated: {what} ends at byte {data_start + stop}, the file has {self._file.size} bytes"
            )
        return StoredTensor(dtype, tuple(shape), data_start + start, stop - start)

    def _check_places(self) -> None:
        in_place = sorted(self.tensors.items(), key=lambda pair: (pair[1].start, pair[1].n_bytes))
        for (before, first), (after, second) in itertools.pairwise(in_place):
            if first.start + first.n_bytes > second.start:
                raise self._damaged(f"tensors {shown(before)} and {shown(after)} overlap")

    def _damaged(self, message: str) -> InvalidModelFile:
        return InvalidModelFile(f"{self.path}: {message}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        again = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shown(again)} appears twice")
    return entries


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
