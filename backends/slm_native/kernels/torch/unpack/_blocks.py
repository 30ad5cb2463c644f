"""Blocks on a device, and bit operations that many formats share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_TORCH_TYPES = {"|u1": torch.uint8, "|i1": torch.int8, "<f2": torch.float16, "<f4": torch.float32}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a block, as plain values that torch.compile can trace.

    Attributes:
        start: its first byte.
        n_bytes: bytes of all its items.
        itemsize: bytes of one item.
        dtype: type of an item; None for unsigned integers of 16 and 32 bits, and for nested fields.
        shape: shape of the items.
        fields: fields of an item.
    """

    start: int
    n_bytes: int
    itemsize: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    fields: dict[str, Field]


def fields_of(block: np.dtype[Any]) -> dict[str, Field]:
    """The fields of a block, named as in the format's NumPy definition."""
    fields = {}
    for name, (dtype, start, *_) in (block.fields or {}).items():
        base, shape = dtype.subdtype or (dtype, ())
        torch_type = _TORCH_TYPES.get(base.str)
        fields[name] = Field(start, dtype.itemsize, base.itemsize, torch_type, shape, fields_of(base))
    return fields


class Blocks:
    """Blocks as bytes, with named fields.

    Unsigned fields of 16 and 32 bits are returned as int32 and int64, as torch supports few operations on unsigned
    integers.

    Args:
        data: uint8 [N, block bytes].
        layout: the fields of a block.
        lead: shape that replaces N in results.
    """

    def __init__(self, data: Tensor, layout: dict[str, Field], lead: tuple[int, ...] | None = None) -> None:
        self._data = data
        self._layout = layout
        self._lead = (len(data),) if lead is None else lead

    def __len__(self) -> int:
        return len(self._data)

    def tensor(self, name: str) -> Tensor:
        """A field [N, ...]."""
        field, raw = self._field(name)
        lead = (*self._lead, *field.shape)
        if field.dtype is not None:
            return raw.view(field.dtype).reshape(lead)
        if field.itemsize == 2:
            return (raw.view(torch.int16).to(torch.int32) & 0xFFFF).reshape(lead)
        return (raw.view(torch.int32).to(torch.int64) & 0xFFFFFFFF).reshape(lead)

    def group(self, name: str) -> Blocks:
        """A field [N, ...] with nested fields."""
        field, raw = self._field(name)
        return Blocks(raw.reshape(-1, field.itemsize), field.fields, (*self._lead, *field.shape))

    def scale(self, name: str = "scale") -> Tensor:
        """A scale for each block, float32 [N, 1]."""
        return self.tensor(name).float()[:, None]

    def _field(self, name: str) -> tuple[Field, Tensor]:
        field = self._layout[name]
        raw = self._data[:, field.start : field.start + field.n_bytes]
        if raw.storage_offset() % field.itemsize or not raw.is_contiguous():
            raw = raw.clone(memory_format=torch.contiguous_format)
        return field, raw


def planes(packed: Tensor, bits: int) -> Tensor:
    """Split bytes into fields, field position slowest: uint8 [..., m] to [..., 8/bits, m], lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed[..., None, :] >> shifts) & ((1 << bits) - 1)


def fields(packed: Tensor, bits: int) -> Tensor:
    """Split bytes into fields, byte by byte: uint8 [..., m] to [..., m * 8/bits], lowest bits first."""
    return planes(packed, bits).transpose(-1, -2).reshape(*packed.shape[:-1], -1)


def shifted(words: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """A field for each shift: integers [...] to [..., n shifts]."""
    return (words[..., None] >> _numbers(shifts, words.dtype, words.device)) & mask


_constants: dict[tuple[object, ...], Tensor] = {}


def _numbers(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that stays on the device for the life of the process: a CUDA graph cannot copy from the host."""
    key = numbers, dtype, device.type, device.index
    if key not in _constants:
        _constants[key] = torch.tensor(numbers, dtype=dtype, device=device)
    return _constants[key]


def affine(q: Tensor, scale: Tensor, zero: int = 0, minus: Tensor | None = None) -> Tensor:
    """``scale * (q - zero) - minus`` for each group: codes [N, G, W], scales [N, G], to float32 [N, G * W]."""
    weights = scale[..., None] * (q.float() - zero)
    if minus is not None:
        weights = weights - minus[..., None]
    return weights.reshape(len(q), -1)


def scaled(scales: Tensor, weights: Tensor) -> Tensor:
    """Multiply each of a block's m groups of weights by its scale: [N, m] and [N, ...] to [N, weights of a block]."""
    return (scales[..., None] * weights.reshape(*scales.shape, -1)).reshape(len(scales), -1)


def six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of the eight sub-blocks of Q4_K and Q5_K, float32 [N, 8] each; see ``slm_core.quant``."""
    low_scale, low_min, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([low_scale & 63, (rest & 15) | (low_scale >> 6 << 4)], dim=1)
    minimums = torch.cat([low_min & 63, (rest >> 4) | (low_min >> 6 << 4)], dim=1)
    return scales.float(), minimums.float()


class Table:
    """A table of a format, copied once to each device that uses it.

    Args:
        make: computes the table in NumPy.
    """

    def __init__(self, make: Callable[[], NDArray[np.float32]]) -> None:
        self._make = make
        self._copies: dict[tuple[str, int | None], Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The table on a device."""
        key = device.type, device.index
        if key not in self._copies:  # torch.compile traces through functools.cache, but not through a dict
            self._copies[key] = torch.from_numpy(np.array(self._make())).to(device)
        return self._copies[key]


def signs_of_bytes(packed: Tensor) -> Tensor:
    """One sign per bit, lowest bit first, set for negative: uint8 [..., m] to float32 [..., m, 8] of +1 and -1."""
    return 1 - 2 * planes(packed[..., None], 1)[..., 0].float()
