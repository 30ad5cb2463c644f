"""The base of quantization formats, and shared bit unpacking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import UnsupportedModel
from slm_core.gguf import GgmlType

Blocks: TypeAlias = NDArray[np.void]
"""Structured array [N] of blocks, in the dtype of the format."""

Encode: TypeAlias = Callable[[NDArray[np.float32], "NDArray[np.float32] | None"], Blocks]
"""From weights and weights of squared errors, float32 [N, block_size] each, to structured blocks [N]."""

E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the sixteen values of FP4 (E2M1); minus zero is read as zero."""


SIGNED_ZERO = 128
"""The offset of ``signed_codes``."""


@dataclass(frozen=True, slots=True)
class Affine:
    """Unpacked blocks: each weight is ``scale * (q - zero) - minus`` of its group.

    Attributes:
        q: codes, uint8 [N, G, W]: N blocks of G groups of W weights.
        scale: float32 [N, G].
        zero: the code of zero.
        minus: float32 [N, G], or None without minimums.
    """

    q: NDArray[np.uint8]
    scale: NDArray[np.float32]
    zero: int = 0
    minus: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """One ggml type: the layout of a block, and its weights.

    Attributes:
        ggml_type: the type.
        block: packed dtype of one block.
        expand: structured blocks [N] to float32 [N, block_size].
        split: structured blocks [N] to codes and scales; None if weights are not codes with scales.
        encode: weights to structured blocks; None if quantizing to the type is not implemented.
    """

    ggml_type: GgmlType
    block: np.dtype[np.void]
    expand: Callable[[Blocks], NDArray[np.float32]]
    split: Callable[[Blocks], Affine] | None = None
    encode: Encode | None = None

    def dequantize(self, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Expand raw blocks.

        Args:
            blocks: uint8 [N, block_bytes], C-contiguous.

        Returns:
            float32 [N, block_size], C-contiguous; an infinite or NaN scale gives infinite or NaN weights.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            return self.expand(blocks.view(self.block)[:, 0])

    def quantize(self, weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> NDArray[np.uint8]:
        """Round weights to blocks.

        Args:
            weights: float32 [N, block_size], finite.
            importance: float32 [N, block_size], finite and not negative: weights of squared errors; None for equal.

        Returns:
            uint8 [N, block_bytes].

        Raises:
            UnsupportedModel: quantizing to the type is not implemented, or a weight is too large for it.
        """
        if self.encode is None:
            raise UnsupportedModel(f"cannot quantize to {self.ggml_type.name}")
        with np.errstate(all="ignore"):
            blocks = self.encode(weights, importance)
            if not self._is_finite(blocks):
                raise UnsupportedModel(
                    f"weights up to {np.abs(weights).max():.3g} are too large for {self.ggml_type.name}"
                )
        return blocks[:, None].view(np.uint8)

    def _is_finite(self, blocks: Blocks) -> bool:
        if self.ggml_type.block_size == 1:
            return bool(np.isfinite(self.expand(blocks)).all())
        halves = [name for name in self.block.names or () if self.block[name] == np.float16]
        return all(np.isfinite(blocks[name]).all() for name in halves)


def affine_format(
    ggml_type: GgmlType, block: np.dtype[np.void], split: Callable[[Blocks], Affine], encode: Encode | None = None
) -> QuantFormat:
    """A format whose blocks are codes and scales."""

    def expand(blocks: Blocks) -> NDArray[np.float32]:
        parts = split(blocks)
        weights = parts.scale[..., None] * (parts.q.astype(np.float32) - np.float32(parts.zero))
        if parts.minus is not None:
            weights -= parts.minus[..., None]
        return weights.reshape(len(blocks), -1)

    return QuantFormat(ggml_type, block, expand, split, encode)


def signed_codes(levels: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Integers from -128 to 127 as codes whose zero is ``SIGNED_ZERO``."""
    return (levels.astype(np.int16) + np.int16(SIGNED_ZERO)).astype(np.uint8)


def planes(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Split bytes into fields, field position slowest: [..., m] to [..., 8/bits, m], lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def fields(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Split bytes into fields, byte by byte: [..., m] to [..., m * 8/bits], lowest bits first."""
    split = np.swapaxes(planes(packed, bits), -1, -2)
    return split.reshape(*packed.shape[:-1], -1)


def pack_planes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The inverse of ``planes``, with the lowest bits of each code: [..., 8/bits, m] to [..., m]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    packed: NDArray[np.uint8] = np.bitwise_or.reduce((codes & np.uint8((1 << bits) - 1)) << shifts, axis=-2)
    return packed


def pack_fields(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The inverse of ``fields``, with the lowest bits of each code: [..., m * 8/bits] to [..., m]."""
    split = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    return pack_planes(np.swapaxes(split, -1, -2), bits)


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
        packed: uint8 [N, 12]. The low six bits of bytes 0-3 are scales 0-3, and of bytes 4-7 minimums 0-3. Bytes 8-11
            are the low four bits of scales 4-7 (low nibble) and minimums 4-7 (high nibble). Their upper two bits are
            the upper two bits of bytes 0-3 and 4-7.

    Returns:
        Scales and minimums, float32 [N, 8] each, 0 to 63.
    """
    low_scale, low_min, low_nibbles = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low_scale & 63, (low_nibbles & 15) | (low_scale >> 6 << 4)], axis=1)
    minimums = np.concatenate([low_min & 63, (low_nibbles >> 4) | (low_min >> 6 << 4)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def pack_six_bit_scales(scales: NDArray[np.uint8], minimums: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The inverse of ``six_bit_scales``: [N, 8] each, 0 to 63, to [N, 12]."""
    high_scale, high_min = scales[:, 4:], minimums[:, 4:]
    low = [scales[:, :4] | high_scale >> 4 << 6, minimums[:, :4] | high_min >> 4 << 6]
    return np.concatenate([*low, high_scale & 15 | (high_min & 15) << 4], axis=1)
