"""Copies cells of a KV cache between the device and the host, for dumps and restores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slm_core.container import check_numbers
from slm_core.context.payload import Section
from slm_core.errors import InvalidSnapshot
from slm_onnx import runtime
from slm_onnx.cells import Cells
from slm_onnx.kvstore import KvStore
from slm_onnx.ports import rows_of

Planes = Sequence[NDArray[Any]]
"""Rows of each tensor of a cache, [K, n, width], in the order of ``KvStore.tensors``."""


class Transfer(Protocol):
    """Copies cells of one cache."""

    def read(self, cells: Callable[[], Cells]) -> Iterator[bytes]:
        """The keys and values of cells [n], in pieces: consecutive arrays, little-endian.

        Args:
            cells: returns the cells; their places may change between pieces.

        Raises:
            DecodeFailed: the runtime reported a failure.
        """
        ...

    def write(self, first: int, planes: Planes) -> None:
        """Fill cells from ``first`` on.

        Raises:
            DecodeFailed: the runtime reported a failure.
        """
        ...

    def sections(self, first: int, n: int) -> list[Section] | None:
        """The sections of a dump of ``n`` cells, written from ``first`` on; None if it cannot be written in pieces."""
        ...


class HostTransfer:
    """Copies cells of a cache in host memory.

    Args:
        store: the cache.
    """

    def __init__(self, store: KvStore) -> None:
        self._store = store

    def read(self, cells: Callable[[], Cells]) -> Iterator[bytes]:
        """One head at a time."""
        for tensor in self._store.tensors.values():
            for head in tensor.numpy()[0]:
                yield packed([head[cells()]])

    def write(self, first: int, planes: Planes) -> None:
        """See ``Transfer.write``."""
        for tensor, plane in zip(self._store.tensors.values(), planes, strict=True):
            tensor.numpy()[0][:, first : first + plane.shape[1]] = plane

    def sections(self, first: int, n: int) -> list[Section]:
        """One section per head."""
        heads = (head for tensor in self._store.tensors.values() for head in tensor.numpy()[0])
        return [Section(n, head[0].nbytes, partial(_fill, head[first : first + n])) for head in heads]


@dataclass(frozen=True, slots=True, eq=False)
class TransferSessions:
    """The sessions for a cache in device memory.

    Attributes:
        clearer: session of ``editor.clear_graph``.
        reader: session of ``editor.read_graph``.
        writer: session of ``editor.write_graph``.
    """

    clearer: Any
    reader: Any
    writer: Any


class DeviceTransfer:
    """Copies cells of a cache in device memory; only the requested cells are copied.

    Args:
        store: the cache.
        sessions: sessions of the graphs that copy.
    """

    def __init__(self, store: KvStore, sessions: TransferSessions) -> None:
        self._store = store
        self._reader = sessions.reader, store.bind(sessions.reader)
        self._writer = sessions.writer, store.bind(sessions.writer)

    def read(self, cells: Callable[[], Cells]) -> Iterator[bytes]:
        """One run of the reader copies all cells."""
        session, binding = self._reader
        binding.bind_cpu_input("source", cells().astype(np.int64))
        for layer, plane, part in self._store.tensors:
            binding.bind_output(rows_of(layer, plane) + part.suffix, "cpu")
        runtime.run(session, binding)
        outputs = binding.get_outputs()
        return (packed([output.numpy()[0]]) for output in outputs)

    def write(self, first: int, planes: Planes) -> None:
        """See ``Transfer.write``."""
        n = planes[0].shape[1]
        if not n:
            return
        session, binding = self._writer
        binding.bind_cpu_input(*self._store.targets(first, n))
        for (layer, plane, part), rows in zip(self._store.tensors, planes, strict=True):
            binding.bind_cpu_input(rows_of(layer, plane) + part.suffix, np.array(rows[None], part.dtype, order="C"))
        runtime.run(session, binding)

    def sections(self, first: int, n: int) -> None:
        """None: one run of the writer writes all cells."""


def _fill(head: NDArray[Any], first: int, data: bytes) -> None:
    """Write rows of a head [n, width] from a dump, from row ``first`` on.

    Raises:
        InvalidSnapshot: numbers that no model computes.
    """
    rows = np.frombuffer(data, head.dtype.newbyteorder("<")).reshape(-1, head.shape[1])
    if rows.dtype.kind == "f":
        check_numbers(rows, "the KV payload")
    head[first : first + len(rows)] = rows


def packed(planes: Planes) -> bytes:
    """Keys and values as bytes of a dump: consecutive arrays, little-endian."""
    return b"".join(np.ascontiguousarray(plane, plane.dtype.newbyteorder("<")).tobytes() for plane in planes)


def unpacked(payload: bytes, shapes: Sequence[tuple[int, int, int]], dtypes: Sequence[np.dtype[Any]]) -> Planes:
    """The keys and values in bytes of a dump.

    Args:
        payload: the result of ``packed``.
        shapes: shape of each array: heads, tokens, width.
        dtypes: dtype of each array.

    Raises:
        InvalidSnapshot: the wrong size, or numbers that no model computes.
    """
    sizes = [math.prod(shape) for shape in shapes]
    ends = np.cumsum([size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]).tolist()
    if len(payload) != ends[-1]:
        raise InvalidSnapshot(f"the KV payload has {len(payload)} bytes, {shapes[0][1]} tokens take {ends[-1]}")
    planes = [
        np.frombuffer(payload, dtype.newbyteorder("<"), size, end - size * dtype.itemsize).reshape(shape)
        for shape, dtype, size, end in zip(shapes, dtypes, sizes, ends, strict=True)
    ]
    for values in planes:
        if values.dtype.kind == "f":
            check_numbers(values, "the KV payload")
    return planes
