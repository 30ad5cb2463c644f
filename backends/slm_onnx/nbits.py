"""Quantized matrices in the format of ``com.microsoft.MatMulNBits``.

No weight is rounded again: codes change their bit layout, and scales are exactly the products that the file's format
defines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slm_core.quant import QuantizedTensor, split_rows

FloatArray = NDArray[np.float32]

_LEAST_BLOCK = 16


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [N, K] for MatMulNBits: ``scales * (code - middle)``, plus ``correction`` for each block of a row.

    The middle of the codes (8 or 128) is the zero point, which is MatMulNBits' default.

    Attributes:
        codes: uint8 [N, K / block, block * bits / 8], the first code in the lowest bits.
        scales: float32 [N, K / block].
        bits: bits of a code, 4 or 8.
        block: weights that share a scale.
        correction: float32 [K / block, N]; multiplied by the sum of each block's activations, and added. None for no
            correction.
    """

    codes: NDArray[np.uint8]
    scales: FloatArray
    bits: int
    block: int
    correction: FloatArray | None


def pack(tensor: QuantizedTensor) -> PackedMatrix | None:
    """Pack a matrix; None if MatMulNBits does not support its codes and blocks."""
    parts = split_rows(tensor.data, tensor.ggml_type, tensor.shape[1])
    if parts is None:
        return None
    group = parts.q.shape[-1]
    if group < _LEAST_BLOCK or group & (group - 1):
        return None
    n_code_bits = int(parts.q.max(initial=1)).bit_length()
    # Codes without a zero point are taken relative to their middle: codes far from zero amplify the rounding of
    # activations.
    zero = parts.zero if parts.minus is None else 1 << (n_code_bits - 1)
    bits = 4 if max(zero, (1 << n_code_bits) - 1) < 16 else 8
    middle = 1 << (bits - 1)
    codes = _pack_codes(parts.q + np.uint8(middle - zero), bits)
    correction = None
    if parts.minus is not None:
        # scale * (q - zero_q) - minus = scale * (q - zero) + (scale * (zero - zero_q) - minus). The second term is
        # equal for all weights of a block, so it multiplies the sum of their activations.
        correction = np.ascontiguousarray((parts.scale * np.float32(zero - parts.zero) - parts.minus).T)
    return PackedMatrix(codes, parts.scale, bits, group, correction)


def finer(matrix: PackedMatrix, bits: int, block: int) -> PackedMatrix:
    """The same weights with at least ``bits`` bits, in blocks of at most ``block`` weights, without a correction."""
    codes, n_parts = matrix.codes, matrix.block // block
    if bits > matrix.bits:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], -1) + np.uint8(128 - 8)
    codes = codes.reshape(len(codes), codes.shape[1] * n_parts, -1)
    return PackedMatrix(codes, np.repeat(matrix.scales, n_parts, axis=1), bits, block, None)


def _pack_codes(q: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    return np.ascontiguousarray(q if bits == 8 else q[..., 0::2] | q[..., 1::2] << np.uint8(4))
