"""The parts of a GGUF file, which can be changed one by one and written again, also with invalid values."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
"""Value types of fixed size, by their id in the file."""
_ALIGNMENT = 32


@dataclass
class Pair:
    """A metadata key, the id of its type, and the bytes of its value."""

    key: bytes
    kind: int
    value: bytes


@dataclass
class Tensor:
    """The entry of a tensor, with its dimensions in the file's order, columns first."""

    name: bytes
    dims: list[int]
    kind: int
    offset: int
    n_dims: int | None = None


@dataclass
class GgufForm:
    """A file in parts. ``n_pairs`` and ``n_tensors`` are the counts in the header; None means the right counts."""

    pairs: list[Pair]
    tensors: list[Tensor]
    data: bytearray
    version: int = 3
    magic: bytes = b"GGUF"
    n_pairs: int | None = None
    n_tensors: int | None = None

    def to_bytes(self) -> bytes:
        """The bytes of the file."""
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_pairs = len(self.pairs) if self.n_pairs is None else self.n_pairs
        parts = [self.magic, struct.pack("<IQQ", self.version, n_tensors, n_pairs)]
        parts += [_string(pair.key) + struct.pack("<I", pair.kind) + pair.value for pair in self.pairs]
        for tensor in self.tensors:
            n_dims = len(tensor.dims) if tensor.n_dims is None else tensor.n_dims
            dims = struct.pack(f"<I{len(tensor.dims)}Q", n_dims, *tensor.dims)
            parts.append(_string(tensor.name) + dims + struct.pack("<IQ", tensor.kind, tensor.offset))
        header = b"".join(parts)
        return header + bytes(-len(header) % _ALIGNMENT) + bytes(self.data)

    def copy(self) -> GgufForm:
        """A copy that shares no mutable object."""
        pairs = [replace(pair) for pair in self.pairs]
        tensors = [replace(tensor, dims=list(tensor.dims)) for tensor in self.tensors]
        return replace(self, pairs=pairs, tensors=tensors, data=bytearray(self.data))

    def pair(self, key: str) -> Pair | None:
        """The first pair with this key."""
        return next((pair for pair in self.pairs if pair.key == key.encode()), None)


def parse(data: bytes) -> GgufForm:
    """Parse a valid file."""
    reader = _Reader(data)
    magic, version, n_tensors, n_pairs = reader.take(4), *reader.unpack("<IQQ")
    pairs = [reader.pair() for _ in range(n_pairs)]
    tensors = [reader.tensor() for _ in range(n_tensors)]
    start = -(-reader.at // _ALIGNMENT) * _ALIGNMENT
    return GgufForm(pairs, tensors, bytearray(data[start:]), version, magic)


@dataclass
class _Reader:
    data: bytes
    at: int = field(default=0)

    def take(self, n: int) -> bytes:
        self.at += n
        return self.data[self.at - n : self.at]

    def unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> bytes:
        return self.take(*self.unpack("<Q"))

    def pair(self) -> Pair:
        key, (kind,) = self.string(), self.unpack("<I")
        start = self.at
        self.skip(kind)
        return Pair(key, kind, self.data[start : self.at])

    def skip(self, kind: int) -> None:
        if kind == STRING:
            self.string()
        elif kind == ARRAY:
            item, n = self.unpack("<IQ")
            for _ in range(n):
                self.skip(item)
        else:
            self.at += struct.calcsize(SCALARS[kind])

    def tensor(self) -> Tensor:
        name, (n_dims,) = self.string(), self.unpack("<I")
        dims = list(self.unpack(f"<{n_dims}Q"))
        return Tensor(name, dims, *self.unpack("<IQ"))


def text_value(text: bytes) -> bytes:
    """The value bytes of a string."""
    return _string(text)


def array_value(kind: int, n: int, items: bytes) -> bytes:
    """The value bytes of an array; ``n`` may be wrong."""
    return struct.pack("<IQ", kind, n) + items


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw
