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
    stream of their own, which wait for nothing that is computed meanwhile. On the CPU nothing is copied: the tensor is
    the mapped file.

    Args:
        device: where to.
        chunk_bytes: bytes of a buffer.
    """

    def __init__(self, device: torch.device, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._ring = _PinnedRing(device, chunk_bytes) if device.type == "cuda" else None

    def upload(self, data: NDArray[np.uint8]) -> Tensor:
        """A tensor's bytes [n] on the device, after all queued operations of the device."""
        if self._device.type == "cpu":
            return as_tensor(data)
        if self._ring is not None:
            return self._ring.copied(as_tensor(data))
        target = torch.empty(len(data), dtype=torch.uint8, device=self._device)
        for start in range(0, len(data), self._chunk_bytes):
            target[start : start + self._chunk_bytes].copy_(as_tensor(data[start : start + self._chunk_bytes]))
        return target

    def close(self) -> None:
        """All weights are uploaded: wait for them, and let go of the buffers."""
        if self._ring is not None:
            self._ring.wait()
        self._ring = None


class _PinnedRing:
    """Two pinned buffers and the stream that empties them."""

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = 0

    def copied(self, source: Tensor) -> Tensor:
        """A copy of ``source`` [n] of the host on the device, once ``wait`` has returned.

        Its memory is that of the copying stream, so that the copy need not wait for kernels that had memory of theirs
        before; it is given back when the stream that computes has no more use for it.
        """
        chunk = len(self._buffers[0])
        with torch.cuda.stream(self._stream):
            target = torch.empty(len(source), dtype=torch.uint8, device=self._device)
            for start in range(0, len(source), chunk):
                part = source[start : start + chunk]
                buffer, free = self._buffers[self._turn], self._free[self._turn]
                free.synchronize()
                buffer[: len(part)].copy_(part)
                target[start : start + len(part)].copy_(buffer[: len(part)], non_blocking=True)
                free.record(self._stream)
                self._turn = 1 - self._turn
        target.record_stream(torch.cuda.current_stream(self._device))
        return target

    def wait(self) -> None:
        """Return once all copies have arrived."""
        self._stream.synchronize()


def as_tensor(data: NDArray[np.uint8]) -> Tensor:
    """A view on NumPy's bytes, which may be read-only: nothing writes through it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(data)
