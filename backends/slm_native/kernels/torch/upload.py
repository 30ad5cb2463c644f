"""Copies weights from the mapped file to a device."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_CHUNK_BYTES = 32 << 20


class Uploader:
    """Copies packed tensors to one device.

    On CUDA there are two pinned buffers: one is read from the file while the other is copied. Copies have a stream of
    their own and do not wait for computation. On the CPU nothing is copied: the tensor is a view of the mapped file.

    Args:
        device: the target device.
        chunk_bytes: bytes of a buffer.
    """

    def __init__(self, device: torch.device, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._ring = _PinnedRing(device, chunk_bytes) if device.type == "cuda" else None

    def upload(self, data: NDArray[np.uint8]) -> Tensor:
        """A tensor's bytes [n] on the device. They may arrive later: wait with ``close`` or ``KernelSet.settle``."""
        if self._device.type == "cpu":
            return as_tensor(data)
        if self._ring is not None:
            return self._ring.copied(as_tensor(data))
        target = torch.empty(len(data), dtype=torch.uint8, device=self._device)
        for start in range(0, len(data), self._chunk_bytes):
            target[start : start + self._chunk_bytes].copy_(as_tensor(data[start : start + self._chunk_bytes]))
        return target

    def close(self) -> None:
        """Wait for all uploads, then free the buffers."""
        if self._ring is not None:
            self._ring.wait()
        self._ring = None


class _PinnedRing:
    """Two pinned buffers, and the stream that copies from them."""

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._current = 0

    def copied(self, source: Tensor) -> Tensor:
        """A copy of the host tensor ``source`` [n] on the device; complete after ``wait``.

        It is allocated on the copying stream, so that the copy does not wait for kernels that used the same memory
        before. ``record_stream`` keeps the memory until the computing stream no longer uses it.
        """
        chunk = len(self._buffers[0])
        with torch.cuda.stream(self._stream):
            target = torch.empty(len(source), dtype=torch.uint8, device=self._device)
            for start in range(0, len(source), chunk):
                part = source[start : start + chunk]
                buffer, free = self._buffers[self._current], self._free[self._current]
                free.synchronize()
                buffer[: len(part)].copy_(part)
                target[start : start + len(part)].copy_(buffer[: len(part)], non_blocking=True)
                free.record(self._stream)
                self._current = 1 - self._current
        target.record_stream(torch.cuda.current_stream(self._device))
        return target

    def wait(self) -> None:
        """Wait for all copies."""
        self._stream.synchronize()


def as_tensor(data: NDArray[np.uint8]) -> Tensor:
    """A view of a NumPy array, which may be read-only: nothing writes through the view."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(data)
