"""Random matrices of every weight type, in the blocks of a file, and their values from the gguf package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import gguf
import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType
from slm_core.quant import dequantize, format_of, row_bytes

ROUNDING = 2.0**-24
"""Relative error of one rounding to float32."""

FLOATS = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)

HALVES = ("scale", "min_scale", "minimum")
"""The float16 fields of blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Weights [n_out, n_in].

    Attributes:
        ggml_type: type of the blocks.
        data: uint8, row by row.
        exact: float64 [n_out, n_in].
        magnitude: float64 [n_out, n_in], to which rounding errors are relative: |scale * code| + |minimum|.
    """

    ggml_type: GgmlType
    data: NDArray[np.uint8]
    exact: NDArray[np.float64]
    magnitude: NDArray[np.float64]

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and of weights per row."""
        return (self.exact.shape[0], self.exact.shape[1])


def as_matrix(ggml_type: GgmlType, data: NDArray[np.uint8], n_in: int) -> Matrix:
    """A matrix from its blocks, row by row."""
    n_out = data.size // row_bytes(ggml_type, n_in)
    exact = _dequantized(ggml_type, data, (n_out, n_in)).astype(np.float64)
    magnitude = np.abs(exact)
    if (minus := _minimums(ggml_type, data)) is not None:
        width = ggml_type.block_size // minus.shape[1]
        magnitude += 2 * np.abs(np.repeat(minus, width, axis=1).reshape(n_out, n_in))
    return Matrix(ggml_type, data, exact, magnitude)


def _minimums(ggml_type: GgmlType, data: NDArray[np.uint8]) -> NDArray[np.float32] | None:
    kind = format_of(ggml_type)
    if kind.split is None:
        return None
    with np.errstate(invalid="ignore"):
        return kind.split(data.view(kind.block)).minus


def _dequantized(ggml_type: GgmlType, data: NDArray[np.uint8], shape: tuple[int, int]) -> NDArray[np.float32]:
    if ggml_type is GgmlType.Q1_0:  # not in the gguf package; core/test_quant.py tests it
        return dequantize(data, ggml_type, shape)
    with np.errstate(over="ignore", invalid="ignore"):
        rows = gguf.quants.dequantize(data.reshape(shape[0], -1), gguf.GGMLQuantizationType(ggml_type))
    return np.asarray(rows, np.float32).reshape(shape)


@lru_cache(maxsize=256)
def random_matrix(ggml_type: GgmlType, n_out: int, n_in: int, seed: int = 0) -> Matrix:
    """A matrix of random bytes with scales of ordinary size."""
    rng = np.random.default_rng([ggml_type, n_out, n_in, seed])
    data = rng.integers(0, 256, n_out * row_bytes(ggml_type, n_in), np.uint8)
    return as_matrix(ggml_type, with_ordinary_scales(data, ggml_type, rng), n_in)


def with_ordinary_scales(data: NDArray[np.uint8], ggml_type: GgmlType, rng: np.random.Generator) -> NDArray[np.uint8]:
    """The same blocks with random float16 scales and weights from -2 to 2, and exponents from 2 ** -8 to 2 ** 7."""
    if ggml_type is GgmlType.BF16:
        return (
            (rng.uniform(-2, 2, data.size // 2).astype(np.float32).view(np.uint32) >> 16)
            .astype(np.uint16)
            .view(np.uint8)
        )
    block = format_of(ggml_type).block
    blocks = data.view(block)
    for name in sorted({*HALVES, "weight"} & set(block.names or ())):
        blocks[name] = rng.uniform(-2, 2, blocks.shape)
    if "exponent" in (block.names or ()):
        blocks["exponent"] = rng.integers(120, 135, blocks.shape)
    return data


def bf16_of(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values rounded to bfloat16 (8 significant bits), ties to even."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)


def int8_values(n_tokens: int, n_in: int, seed: int) -> NDArray[np.float32]:
    """Activations that are exact in int8: the largest of each 32 is 127, times a power of two per row."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-127, 128, (n_tokens, n_in)).astype(np.float32)
    x[:, ::32] = np.where(rng.random(x[:, ::32].shape) < 0.5, 127, -127)
    return np.asarray(x * np.exp2(rng.integers(-20, 20, (n_tokens, 1))), np.float32)


def float32_bound(x: NDArray[np.float32], matrix: Matrix) -> NDArray[np.float64]:
    """The error bound of float32 sums: n products for float weights, or two per group of 16 weights for integer codes.

    A result is summed in lanes, in the worst case sequentially, and then over the lanes. Each term is rounded at most
    four times before.
    """
    n_in = matrix.shape[1]
    n_sums = n_in if matrix.ggml_type in FLOATS else 2 * (n_in // 16)
    bound: NDArray[np.float64] = (n_sums + 24) * ROUNDING * (np.abs(x.astype(np.float64)) @ matrix.magnitude.T)
    return bound
