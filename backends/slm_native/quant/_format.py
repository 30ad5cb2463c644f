"""What a quantization format is, and the bit unpacking that many of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType

Blocks: TypeAlias = NDArray[np.void]
"""Structured array [N] of blocks in a format's own dtype."""

E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the sixteen values of FP4 (E2M1); minus zero is read as zero."""


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """One ggml type: how a block lies in the file, and what it stands for.

    Attributes:
        ggml_type: the type.
        block: packed dtype of one block.
        expand: structured blocks [N] to float32 [N, block_size].
    """

    ggml_type: GgmlType
    block: np.dtype[np.void]
    expand: Callable[[Blocks], NDArray[np.float32]]

    def dequantize(self, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Expand raw blocks.

        Args:
            blocks: uint8 [N, block_bytes], C-contiguous.

        Returns:
            float32 [N, block_size], C-contiguous; a scale that is infinite or not a number gives such weights.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            return self.expand(blocks.view(self.block)[:, 0])


def planes(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Split bytes into fields, field position slowest: [..., m] to [..., 8/bits, m], lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def fields(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Split bytes into fields, byte by byte: [..., m] to [..., m * 8/bits], lowest bits first."""
    split = np.swapaxes(planes(packed, bits), -1, -2)
    return split.reshape(*packed.shape[:-1], -1)


def as_float(column: NDArray[np.generic]) -> NDArray[np.float32]:
    """A per-block value [N] as float32 [N, 1], to scale the rows of an [N, m] array."""
    return column.astype(np.float32)[:, None]


def scaled(scales: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply each of a block's m groups of weights by its scale: [N, m] and [N, ...] to [N, weights in a block]."""
    groups = weights.reshape(*scales.shape, -1)
    product: NDArray[np.float32] = scales[..., None] * groups
    return product.reshape(len(scales), -1)


def six_bit_scales(packed: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and minimums of the eight sub-blocks of Q4_K and Q5_K.

    Args:
        packed: uint8 [N, 12]. Bytes 0-3 hold scales 0-3 and bytes 4-7 minimums 0-3 in their low six bits; bytes 8-11
            hold the low four bits of scales (low nibble) and minimums (high nibble) 4-7, whose upper two bits are the
            upper two bits of bytes 0-3 and 4-7.

    Returns:
        Scales and minimums, float32 [N, 8] each, 0 to 63.
    """
    low_scale, low_min, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low_scale & 63, (rest & 15) | (low_scale >> 6 << 4)], axis=1)
    minimums = np.concatenate([low_min & 63, (rest >> 4) | (low_min >> 6 << 4)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)
