"""Weights from the mapped file into a device's memory."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_CHUNK_BYTES = 32 << 20


class Uploader:
    """Copies tensors, packed as they are, to one device.

    On CUDA a chunk is read from the file into pinned memory while the one before it travels: two buffers, copies on a
    stream of their own. On the CPU nothing is copied: the tensor is the mapped file.

    Args:
        device: where to.
        chunk_bytes: bytes of a buffer.
    """

    def __init__(self, device: torch.device, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._ring = _PinnedRing(device, chunk_bytes) if device.type == "cuda" else None

    def upload(self, data: NDArray[np.uint8]) -> Tensor:
        """A tensor's bytes [n] on the device; later work of the current stream finds them there."""
        if self._device.type == "cpu":
            return as_tensor(data)
        target = torch.empty(len(data), dtype=torch.uint8, device=self._device)
        if self._ring is not None:
            self._ring.copy(as_tensor(data), target)
            return target
        for start in range(0, len(data), self._chunk_bytes):
            target[start : start + self._chunk_bytes].copy_(as_tensor(data[start : start + self._chunk_bytes]))
        return target

    def close(self) -> None:
        """All weights are there: let go of the buffers."""
        self._ring = None


class _PinnedRing:
    """Two pinned buffers and the stream that empties them."""

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy ``source`` [n] of the host to ``target`` [n] of the device."""
        current = torch.cuda.current_stream(target.device)
        self._stream.wait_stream(current)  # the target's memory may still be in use by what had it before
        chunk = len(self._buffers[0])
        for start in range(0, len(source), chunk):
            part = source[start : start + chunk]
            buffer, free = self._buffers[self._turn], self._free[self._turn]
            free.synchronize()
            buffer[: len(part)].copy_(part)
            with torch.cuda.stream(self._stream):
                target[start : start + len(part)].copy_(buffer[: len(part)], non_blocking=True)
                free.record(self._stream)
            self._turn = 1 - self._turn
        target.record_stream(self._stream)
        current.wait_stream(self._stream)


def as_tensor(data: NDArray[np.uint8]) -> Tensor:
    """A view on NumPy's bytes, which may be read-only: nothing writes through it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(data)
