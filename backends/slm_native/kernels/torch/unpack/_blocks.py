"""Blocks on a device, and the bit unpacking that many formats share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_TORCH_TYPES = {"|u1": torch.uint8, "|i1": torch.int8, "<f2": torch.float16, "<f4": torch.float32}


class Blocks:
    """Raw blocks and their fields, by the names of the format's NumPy definition.

    Unsigned fields of 16 and 32 bits come as int32 and int64, which hold their values: torch computes little with
    unsigned integers.

    Args:
        data: uint8 [N, block bytes].
        block: the packed dtype of a block.
        lead: shape of what N counts.
    """

    def __init__(self, data: Tensor, block: np.dtype[Any], lead: tuple[int, ...] | None = None) -> None:
        self._data = data
        self._block = block
        self._lead = (len(data),) if lead is None else lead

    def __len__(self) -> int:
        return len(self._data)

    def tensor(self, name: str) -> Tensor:
        """A field [N, ...]."""
        base, shape, raw = self._field(name)
        lead = (*self._lead, *shape)
        if base.str in _TORCH_TYPES:
            return raw.view(_TORCH_TYPES[base.str]).reshape(lead)
        if base.itemsize == 2:
            return (raw.view(torch.int16).to(torch.int32) & 0xFFFF).reshape(lead)
        return (raw.view(torch.int32).to(torch.int64) & 0xFFFFFFFF).reshape(lead)

    def group(self, name: str) -> Blocks:
        """A field [N, ...] that has fields of its own."""
        base, shape, raw = self._field(name)
        return Blocks(raw.reshape(-1, base.itemsize), base, (*self._lead, *shape))

    def scale(self, name: str = "scale") -> Tensor:
        """A value for each block, float32 [N, 1], to scale the rows of an [N, m] tensor."""
        return self.tensor(name).float()[:, None]

    def _field(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...], Tensor]:
        assert self._block.fields is not None, "a block has fields"
        dtype, offset = self._block.fields[name][:2]
        base, shape = dtype.subdtype or (dtype, ())
        raw = self._data[:, offset : offset + dtype.itemsize]
        if raw.storage_offset() % base.itemsize or not raw.is_contiguous():
            raw = raw.clone(memory_format=torch.contiguous_format)
        return base, shape, raw


def planes(packed: Tensor, bits: int) -> Tensor:
    """Split bytes into fields, field position slowest: uint8 [..., m] to [..., 8/bits, m], lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed[..., None, :] >> shifts) & ((1 << bits) - 1)


def fields(packed: Tensor, bits: int) -> Tensor:
    """Split bytes into fields, byte by byte: uint8 [..., m] to [..., m * 8/bits], lowest bits first."""
    return planes(packed, bits).transpose(-1, -2).reshape(*packed.shape[:-1], -1)


def shifted(words: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """A field of each shift: integers [...] to [..., n shifts]."""
    return (words[..., None] >> _numbers(shifts, words.dtype, words.device)) & mask


@cache
def _numbers(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a device for as long as the process lives: a copy from the host cannot be part of a CUDA graph."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def affine(q: Tensor, scale: Tensor, zero: int = 0, minus: Tensor | None = None) -> Tensor:
    """``scale * (q - zero) - minus`` of each group: codes [N, G, W], scales [N, G], to float32 [N, G * W]."""
    weights = scale[..., None] * (q.float() - zero)
    if minus is not None:
        weights = weights - minus[..., None]
    return weights.reshape(len(q), -1)


def scaled(scales: Tensor, weights: Tensor) -> Tensor:
    """Multiply each of a block's m groups of weights by its scale: [N, m] and [N, ...] to [N, weights in a block]."""
    return (scales[..., None] * weights.reshape(*scales.shape, -1)).reshape(len(scales), -1)


def six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of the eight sub-blocks of Q4_K and Q5_K, float32 [N, 8] each; see ``slm_core.quant``."""
    low_scale, low_min, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([low_scale & 63, (rest & 15) | (low_scale >> 6 << 4)], dim=1)
    minimums = torch.cat([low_min & 63, (rest >> 4) | (low_min >> 6 << 4)], dim=1)
    return scales.float(), minimums.float()


@cache
def table(make: Callable[[], NDArray[np.float32]], device: torch.device) -> Tensor:
    """A table of a format, on a device, for as long as the process lives.

    Args:
        make: the table in NumPy; a function of the module, as its result is found by it.
        device: where it is wanted.
    """
    return torch.from_numpy(np.array(make())).to(device)


def signs_of_bytes(packed: Tensor) -> Tensor:
    """One sign a bit, set for negative, lowest first: uint8 [..., m] to float32 [..., m, 8] of +1 and -1."""
    return 1 - 2 * planes(packed[..., None], 1)[..., 0].float()
