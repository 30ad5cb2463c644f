"""The memory of a KV cache: one tensor for the keys and one for the values of each layer, on the provider's device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import ModelSpec
from slm_core.errors import InvalidOption, InvalidSnapshot
from slm_onnx import runtime
from slm_onnx.cells import Cells, Move
from slm_onnx.ports import PLANES, past, present
from slm_onnx.positions import Positions
from slm_onnx.providers import Device

_AT_ONCE = 64  # cells: what a layer's pass over them reads and writes then stays in a core's cache


class KvStore:
    """Keys after RoPE and values, [1, K, n_cells, D] each.

    Args:
        spec: the model.
        n_cells: cells c.
        dtype: "float32" or "float16".
        device: where they lie.

    Attributes:
        n_cells: cells c.

    Raises:
        InvalidOption: the system refuses so much memory.
    """

    def __init__(self, spec: ModelSpec, n_cells: int, dtype: str, device: Device) -> None:
        self.n_cells = n_cells
        self._shape = (1, spec.n_kv_heads, n_cells, spec.head_dim)
        self._dtype = np.dtype(dtype)
        self._on_host = device.on_host
        names = [(layer, plane) for layer in range(spec.n_layers) for plane in PLANES]
        try:
            # Zeroed: what happens to lie in memory may be no number, and would spoil what it is masked out of.
            self._tensors = {name: device.zeros(self._shape, self._dtype) for name in names}
        except MemoryError as error:
            n_bytes = len(names) * math.prod(self._shape) * self._dtype.itemsize
            raise InvalidOption(
                f"a KV cache of {n_bytes} bytes is more than this machine can reserve: use a smaller n_ctx"
            ) from error

    def bind(self, session: Any) -> Any:
        """A binding of a session that lets it read and write, in place, what it names of the cache."""
        binding, named = session.io_binding(), {port.name for port in session.get_inputs()}
        for (layer, plane), tensor in self._tensors.items():
            if past(layer, plane) in named:
                binding.bind_ortvalue_input(past(layer, plane), tensor)
                binding.bind_ortvalue_output(present(layer, plane), tensor)
        return binding

    def read(self, cells: Cells) -> bytes:
        """The keys and values of cells [n]: [L, 2, K, n, D], little-endian."""
        planes = [tensor.numpy()[0][:, cells] for tensor in self._tensors.values()]
        return b"".join(np.ascontiguousarray(plane, self._dtype.newbyteorder("<")).tobytes() for plane in planes)

    def write(self, first: int, n: int, payload: bytes) -> None:
        """Fill ``n`` cells from ``first`` on with what ``read`` gave.

        Raises:
            InvalidSnapshot: the wrong size, or numbers that are infinite or none; nothing was written.
        """
        shape = len(self._tensors), self._shape[1], n, self._shape[3]
        planes = parse_planes(payload, shape, self._dtype)
        for tensor, plane in zip(self._tensors.values(), planes, strict=True):
            values = tensor.numpy()
            values[0][:, first : first + n] = plane
            if not self._on_host:
                tensor.update_inplace(values)


def parse_planes(payload: bytes, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Keys and values from a dump.

    Args:
        payload: little-endian numbers.
        shape: planes (keys, values of each layer), heads, tokens, width.
        dtype: of the cache.

    Raises:
        InvalidSnapshot: the wrong size, or numbers that are infinite or none.
    """
    size = math.prod(shape) * dtype.itemsize
    if len(payload) != size:
        raise InvalidSnapshot(f"the KV payload has {len(payload)} bytes, {shape[2]} tokens take {size}")
    values = np.frombuffer(payload, dtype.newbyteorder("<")).reshape(shape)
    if not np.isfinite(values).all():
        raise InvalidSnapshot("the KV payload holds numbers that are infinite or not numbers")
    return values


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
