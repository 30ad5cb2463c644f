"""The memory of a KV cache: one tensor for the keys and one for the values of each layer, on the provider's device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import ModelSpec
from slm_core.errors import DecodeFailed, InvalidOption
from slm_core.types import KvType
from slm_onnx import runtime
from slm_onnx.cells import Move
from slm_onnx.ports import PLANES, Part, parts, past, present
from slm_onnx.positions import Positions
from slm_onnx.providers import Device

_AT_ONCE = 64  # cells: the data of one layer then fits in a core's cache


class KvStore:
    """Keys (after RoPE) and values, [1, K, n_cells, width] each; a quantized type has several tensors per plane.

    They are on the device of the graphs, which read and write them in place. No call copies a whole cache.

    Args:
        spec: the model's architecture and sizes.
        n_cells: number of cells c.
        kv_type: the KV type.
        device: device of the tensors.
        clearer: session of ``editor.clear_graph``; None for host memory.

    Attributes:
        n_cells: number of cells c.
        on_host: whether they are in host memory.
        tensors: ``OrtValue`` of each tensor, by layer and plane.

    Raises:
        InvalidOption: the system refuses to allocate the memory.
    """

    def __init__(self, spec: ModelSpec, n_cells: int, kv_type: KvType, device: Device, clearer: Any | None) -> None:
        self.n_cells = n_cells
        self.on_host = device.on_host
        kv_parts = parts(kv_type, spec.head_dim)
        names = [(layer, plane, part) for layer in range(spec.n_layers) for plane in PLANES for part in kv_parts]
        self._shape = 1, spec.n_kv_heads, n_cells
        make = device.zeros if clearer is None else device.empty
        self.tensors: dict[tuple[int, str, Part], Any] = {}
        try:
            # Zeroed: uninitialized memory may contain NaN, and a masked NaN still spoils the result.
            for name in names:
                self.tensors[name] = make((*self._shape, name[2].width), np.dtype(name[2].dtype))
            if clearer is not None:
                self._clear(clearer, kv_parts[0])
        except (
            MemoryError,
            DecodeFailed,
        ) as error:  # DecodeFailed: the device refused the memory when it was first used
            self.tensors.clear()
            n_bytes = sum(n_cells * spec.n_kv_heads * part.width * np.dtype(part.dtype).itemsize for *_, part in names)
            raise InvalidOption(
                f"a KV cache of {n_bytes} bytes is more than this machine can reserve: use a smaller n_ctx"
            ) from error

    def bind(self, session: Any) -> Any:
        """A binding of a session whose cache inputs and outputs are this memory."""
        binding = session.io_binding()
        read, written = ({port.name for port in ports} for ports in (session.get_inputs(), session.get_outputs()))
        for (layer, plane, part), tensor in self.tensors.items():
            if (name := past(layer, plane) + part.suffix) in read:
                binding.bind_ortvalue_input(name, tensor)
            if (name := present(layer, plane) + part.suffix) in written:
                binding.bind_ortvalue_output(name, tensor)
        return binding

    def targets(self, first: int, n: int) -> tuple[str, NDArray[np.int64]]:
        """The input of an editing graph that makes it write ``n`` cells from ``first`` on: its name and its value."""
        if self.on_host:
            return "to", np.array([first], np.int64)
        indices = np.zeros((1, self._shape[1], n, 3), np.int64)
        indices[..., 1] = np.arange(self._shape[1])[:, None]
        indices[..., 2] = np.arange(first, first + n)
        return "places", indices

    def _clear(self, clearer: Any, part: Part) -> None:
        binding = self.bind(clearer)
        binding.bind_cpu_input("shape", np.array([*self._shape, part.width], np.int64))
        runtime.run(clearer, binding)


class CellMover:
    """Runs the graphs that move cells.

    Args:
        mover: session of ``editor.edit_graph``.
        rotator: session of the same graph for keys only; None if no layer uses RoPE.
        store: the cache.
        positions: the RoPE tables of rotations.
    """

    def __init__(self, mover: Any, rotator: Any | None, store: KvStore, positions: Positions) -> None:
        self._store = store
        self._mover = mover, store.bind(mover)
        self._rotator = None if rotator is None else (rotator, store.bind(rotator))
        self._positions = positions

    def run(self, move: Move) -> None:
        """Move cells and rotate keys; values of cells that stay in place are not read or written.

        Raises:
            DecodeFailed: the runtime reported a failure.
        """
        if not move.stays:
            self._run(*self._mover, move)
        elif self._rotator is not None:
            for piece in move.pieces(_AT_ONCE):
                self._run(*self._rotator, piece)

    def _run(self, session: Any, binding: Any, move: Move) -> None:
        binding.bind_cpu_input("source", move.source.astype(np.int64))
        binding.bind_cpu_input(*self._store.targets(move.to, len(move.source)))
        for name, array in self._positions.turns(move.delta):
            binding.bind_cpu_input(name, array)
        runtime.run(session, binding)
