"""Writing small GGUF files: version 3, little-endian, single-file. The format is ggml's docs/gguf.md."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Value: TypeAlias = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[bool] | Sequence[float]

_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_ITEMS = {str: (_STRING, ""), bool: (_BOOL, "<?"), int: (_INT32, "<i"), float: (_FLOAT32, "<f")}
_TYPE_IDS = {"f32": 0, "f16": 1, "q8_0": 8, "mxfp4": 39}
_Q8_0 = np.dtype([("scale", "<f2"), ("quants", "i1", 32)])


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the encoding of a file.

    Attributes:
        shape: rows first, as in NumPy.
        weight_type: "f32", "f16" or "q8_0"; or "mxfp4", for blocks that the caller packed.
        data: the packed blocks.
    """

    shape: tuple[int, ...]
    weight_type: str
    data: bytes

    @classmethod
    def pack(cls, values: NDArray[np.float32], weight_type: str) -> StoredTensor:
        """Round ``values`` to ``weight_type`` and pack them. ``values()`` returns the rounded values."""
        if weight_type == "q8_0":
            return cls(values.shape, weight_type, _quantize_q8_0(values).tobytes())
        dtype = {"f32": "<f4", "f16": "<f2"}[weight_type]
        return cls(values.shape, weight_type, values.astype(dtype).tobytes())

    def values(self) -> NDArray[np.float32]:
        """The unpacked blocks, float32 of ``shape``."""
        if self.weight_type == "q8_0":
            blocks = np.frombuffer(self.data, _Q8_0)
            flat = blocks["scale"].astype(np.float32)[:, None] * blocks["quants"].astype(np.float32)
        else:
            flat = np.frombuffer(self.data, {"f32": "<f4", "f16": "<f2"}[self.weight_type]).astype(np.float32)
        return flat.reshape(self.shape)


def _quantize_q8_0(values: NDArray[np.float32]) -> NDArray[np.void]:
    """Blocks of 32 signed bytes with one float16 scale (ggml type Q8_0)."""
    rows = values.reshape(-1, 32)
    scale = np.abs(rows).max(axis=1) / np.float32(127)
    blocks = np.empty(len(rows), _Q8_0)
    blocks["scale"] = scale
    blocks["quants"] = np.rint(rows / np.where(scale == 0, 1, scale)[:, None])
    return blocks


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, StoredTensor]) -> Path:
    """Write a model file; returns ``path``.

    Args:
        path: the file, overwritten.
        metadata: integers become uint32, floats float32, lists arrays of strings, bools, float32 or int32.
        tensors: by name, in file order.
    """
    header = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    header += [_string(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for name, tensor in tensors.items():
        dims = tensor.shape[::-1]
        layout = f"<I{len(dims)}QIQ"
        header.append(_string(name) + struct.pack(layout, len(dims), *dims, _TYPE_IDS[tensor.weight_type], offset))
        offset += len(_padded(tensor.data))
    body = [_padded(tensor.data) for tensor in tensors.values()]
    path.write_bytes(_padded(b"".join(header)) + b"".join(body))
    return path


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    item_type, layout = _ITEMS[type(value[0])]
    items = [_string(item) if isinstance(item, str) else struct.pack(layout, item) for item in value]
    return struct.pack("<IIQ", _ARRAY, item_type, len(value)) + b"".join(items)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)
