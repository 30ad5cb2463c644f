"""The memory of a KV cache: one tensor for the keys and one for the values of each layer, on the provider's device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import ModelSpec
from slm_core.errors import InvalidOption, InvalidSnapshot
from slm_core.snapshot import check_numbers
from slm_core.types import KvType
from slm_onnx import runtime
from slm_onnx.cells import Cells, Move
from slm_onnx.ports import PLANES, parts, past, present
from slm_onnx.positions import Positions
from slm_onnx.providers import Device

_AT_ONCE = 64  # cells: what a layer's pass over them reads and writes then stays in a core's cache


class KvStore:
    """Keys after RoPE and values, [1, K, n_cells, width] each, in as many parts as their type has.

    Args:
        spec: the model.
        n_cells: cells c.
        kv_type: how they are kept.
        device: where they lie.

    Attributes:
        n_cells: cells c.

    Raises:
        InvalidOption: the system refuses so much memory.
    """

    def __init__(self, spec: ModelSpec, n_cells: int, kv_type: KvType, device: Device) -> None:
        self.n_cells = n_cells
        self._on_host = device.on_host
        kept = parts(kv_type, spec.head_dim)
        names = [(layer, plane, part) for layer in range(spec.n_layers) for plane in PLANES for part in kept]
        try:
            # Zeroed: what happens to lie in memory may be no number, and would spoil what it is masked out of.
            self._tensors = {
                name: device.zeros((1, spec.n_kv_heads, n_cells, name[2].width), np.dtype(name[2].dtype))
                for name in names
            }
        except MemoryError as error:
            n_bytes = sum(n_cells * spec.n_kv_heads * part.width * np.dtype(part.dtype).itemsize for *_, part in names)
            raise InvalidOption(
                f"a KV cache of {n_bytes} bytes is more than this machine can reserve: use a smaller n_ctx"
            ) from error

    def bind(self, session: Any) -> Any:
        """A binding of a session that lets it read and write, in place, what it names of the cache."""
        binding, named = session.io_binding(), {port.name for port in session.get_inputs()}
        for (layer, plane, part), tensor in self._tensors.items():
            if (name := past(layer, plane) + part.suffix) in named:
                binding.bind_ortvalue_input(name, tensor)
                binding.bind_ortvalue_output(present(layer, plane) + part.suffix, tensor)
        return binding

    def read(self, cells: Cells) -> bytes:
        """The keys and values of cells [n], part by part: [K, n, width] each, little-endian."""
        planes = [tensor.numpy()[0][:, cells] for tensor in self._tensors.values()]
        return b"".join(np.ascontiguousarray(plane, plane.dtype.newbyteorder("<")).tobytes() for plane in planes)

    def parse(self, n: int, payload: bytes) -> list[NDArray[Any]]:
        """The keys and values of ``n`` cells that ``read`` gave, part by part: [K, n, width] each.

        Raises:
            InvalidSnapshot: the wrong size, or numbers that are infinite or none.
        """
        shapes = [(tensor.shape()[1], n, part.width) for (*_, part), tensor in self._tensors.items()]
        dtypes = [np.dtype(part.dtype) for *_, part in self._tensors]
        return parse_planes(payload, shapes, dtypes)

    def write(self, first: int, n: int, payload: bytes) -> None:
        """Fill ``n`` cells from ``first`` on with what ``read`` gave.

        Raises:
            InvalidSnapshot: as ``parse``; nothing was written.
        """
        for tensor, plane in zip(self._tensors.values(), self.parse(n, payload), strict=True):
            values = tensor.numpy()
            values[0][:, first : first + n] = plane
            if not self._on_host:
                tensor.update_inplace(values)


def parse_planes(
    payload: bytes, shapes: Sequence[tuple[int, int, int]], dtypes: Sequence[np.dtype[Any]]
) -> list[NDArray[Any]]:
    """Keys and values from a dump.

    Args:
        payload: arrays behind one another, little-endian.
        shapes: of each: heads, tokens, width.
        dtypes: of each.

    Raises:
        InvalidSnapshot: the wrong size, or numbers that no model computes.
    """
    sizes = [math.prod(shape) for shape in shapes]
    ends = np.cumsum([size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]).tolist()
    if len(payload) != ends[-1]:
        raise InvalidSnapshot(f"the KV payload has {len(payload)} bytes, {shapes[0][1]} tokens take {ends[-1]}")
    found = [
        np.frombuffer(payload, dtype.newbyteorder("<"), size, end - size * dtype.itemsize).reshape(shape)
        for shape, dtype, size, end in zip(shapes, dtypes, sizes, ends, strict=True)
    ]
    for values in found:
        if values.dtype.kind == "f":
            check_numbers(values, "the KV payload")
    return found


class CellMover:
    """Runs the graphs that move cells.

    Args:
        mover: session of ``editor.edit_graph``.
        turner: the same for keys alone; None where no layer rotates them.
        store: the cache.
        positions: how far keys turn.
    """

    def __init__(self, mover: Any, turner: Any | None, store: KvStore, positions: Positions) -> None:
        self._mover = mover, store.bind(mover)
        self._turner = None if turner is None else (turner, store.bind(turner))
        self._positions = positions

    def run(self, move: Move) -> None:
        """Move cells, their keys rotated; values that stay where they are are not touched.

        Raises:
            DecodeFailed: the runtime reported a failure.
        """
        if not move.stays:
            self._run(*self._mover, move)
        elif self._turner is not None:
            for piece in move.pieces(_AT_ONCE):
                self._run(*self._turner, piece)

    def _run(self, session: Any, binding: Any, move: Move) -> None:
        binding.bind_cpu_input("source", move.source.astype(np.int64))
        binding.bind_cpu_input("to", np.array([move.to], np.int64))
        for name, array in self._positions.turns(move.delta):
            binding.bind_cpu_input(name, array)
        runtime.run(session, binding)
