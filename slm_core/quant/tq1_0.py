"""TQ1_0 (ggml type 34): 256 ternary weights, five to a byte in base 3, one scale; 1.6875 bits a weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant._format import Blocks, QuantFormat, as_float

BLOCK = np.dtype(
    [
        ("five_by_32", "u1", 32),  # byte j: weights j, j + 32, ... j + 128, the first in the leading base-3 digit
        ("five_by_16", "u1", 16),  # byte j: weights 160 + j, 160 + j + 16, ... 160 + j + 64
        ("four_by_4", "u1", 4),  # byte j: weights 240 + j, ... 240 + j + 12
        ("scale", "<f2"),
    ]
)


def expand(blocks: Blocks) -> NDArray[np.float32]:
    """``scale * (digit - 1)``."""
    runs = [_digits(blocks[name], n) for name, n in (("five_by_32", 5), ("five_by_16", 5), ("four_by_4", 4))]
    return as_float(blocks["scale"]) * (np.concatenate(runs, axis=1) - 1)


def _digits(packed: NDArray[np.uint8], n: int) -> NDArray[np.float32]:
    """The first ``n`` base-3 digits of each byte, [N, m] to [N, n * m], digit slowest.

    A byte b is the fraction b / 256: multiplying by 3**i removes the first i digits, modulo 256.
    """
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:n, None]
    fraction = packed[:, None, :] * powers  # [N, n, m], wraps modulo 256
    return (fraction.astype(np.uint16) * 3 >> 8).reshape(len(packed), -1).astype(np.float32)


FORMAT = QuantFormat(GgmlType.TQ1_0, BLOCK, expand)
