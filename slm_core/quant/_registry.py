"""Finds the formats and applies them to whole tensors."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgmlType
from slm_core.quant._format import Affine, QuantFormat
from slm_core.submodules import public_modules

# Weights expanded or rounded at a time, so that temporary arrays stay in the processor's cache.
_CHUNK_WEIGHTS = 1 << 16


@cache
def _formats() -> Mapping[GgmlType, QuantFormat]:
    names = public_modules(__package__)
    formats: list[QuantFormat] = [importlib.import_module(f"{__package__}.{name}").FORMAT for name in names]
    return MappingProxyType({quant_format.ggml_type: quant_format for quant_format in formats})


def supported_types() -> list[GgmlType]:
    """The types that can be dequantized, by id."""
    return sorted(_formats())


def format_of(ggml_type: GgmlType) -> QuantFormat:
    """The format of a type.

    Raises:
        UnsupportedModel: there is none; the message lists the supported types.
    """
    quant_format = _formats().get(ggml_type)
    if quant_format is None:
        accepted = ", ".join(t.name for t in supported_types())
        raise UnsupportedModel(f"cannot dequantize tensor type {ggml_type.name} (supported: {accepted})")
    return quant_format


def row_bytes(ggml_type: GgmlType, n_cols: int) -> int:
    """Bytes of one row of ``n_cols`` weights.

    Raises:
        InvalidModelFile: a row is not a whole number of blocks.
    """
    n_blocks, remainder = divmod(n_cols, ggml_type.block_size)
    if remainder or n_cols < 1:
        raise InvalidModelFile(
            f"a row of {n_cols} weights is not a whole number of {ggml_type.name} blocks of {ggml_type.block_size}"
        )
    return n_blocks * ggml_type.block_bytes


def check_tensor(data: NDArray[np.uint8], ggml_type: GgmlType, shape: Sequence[int]) -> None:
    """Check that ``data`` can be dequantized to ``shape``.

    Raises:
        UnsupportedModel: the type has no format here.
        InvalidModelFile: a row is not a whole number of blocks, or ``data`` has the wrong size.
    """
    check_size(data.size, ggml_type, shape)


def check_size(n_bytes: int, ggml_type: GgmlType, shape: Sequence[int]) -> None:
    """Check that ``n_bytes`` of packed blocks can be dequantized to ``shape``.

    Raises:
        UnsupportedModel, InvalidModelFile: see ``check_tensor``.
    """
    format_of(ggml_type)
    expected = math.prod(shape[:-1]) * row_bytes(ggml_type, shape[-1])
    if n_bytes != expected:
        raise InvalidModelFile(f"{ggml_type.name} weights of shape {tuple(shape)} take {expected} bytes, got {n_bytes}")


def dequantize(data: NDArray[np.uint8], ggml_type: GgmlType, shape: Sequence[int]) -> NDArray[np.float32]:
    """Expand a whole tensor.

    Args:
        data: uint8 [n_bytes], C-contiguous: the blocks in the layout of the file.
        ggml_type: their type.
        shape: row-major, slowest dimension first.

    Returns:
        A new float32 array of that shape.

    Raises:
        UnsupportedModel: the type has no format here.
        InvalidModelFile: a row is not a whole number of blocks, or ``data`` has the wrong size.
    """
    check_tensor(data, ggml_type, shape)
    return _expand(format_of(ggml_type), data.reshape(-1, ggml_type.block_bytes)).reshape(shape)


def dequantize_rows(
    data: NDArray[np.uint8], ggml_type: GgmlType, n_cols: int, row_ids: NDArray[np.integer]
) -> NDArray[np.float32]:
    """Expand only some rows of a matrix.

    Args:
        data: uint8 [n_bytes], C-contiguous: all rows of the matrix.
        ggml_type: the type of its blocks.
        n_cols: weights in a row.
        row_ids: [T] rows to expand, in any order, repeats allowed.

    Returns:
        float32 [T, n_cols].

    Raises:
        UnsupportedModel: the type has no format here.
        InvalidModelFile: a row is not a whole number of blocks, or ``data`` is not a whole number of rows.
        IndexError: a row outside the matrix.
    """
    quant_format = format_of(ggml_type)
    width = row_bytes(ggml_type, n_cols)
    if data.size % width:
        raise InvalidModelFile(f"{data.size} bytes are not a whole number of {ggml_type.name} rows of {width} bytes")
    rows = data.reshape(-1, width)
    if row_ids.size and not 0 <= row_ids.min() <= row_ids.max() < len(rows):
        raise IndexError(f"row ids span {row_ids.min()} to {row_ids.max()}, the matrix has rows 0 to {len(rows) - 1}")
    return _expand(quant_format, rows[row_ids].reshape(-1, ggml_type.block_bytes)).reshape(-1, n_cols)


def split_rows(data: NDArray[np.uint8], ggml_type: GgmlType, n_cols: int) -> Affine | None:
    """Unpack a matrix into codes and scales, for engines that multiply with them.

    Args:
        data: uint8 [n_bytes], C-contiguous: all rows of the matrix.
        ggml_type: the type of its blocks.
        n_cols: weights in a row.

    Returns:
        Groups row by row: codes [n_rows, groups in a row, W], scales [n_rows, groups in a row]; None if the type's
        weights are not codes with scales.

    Raises:
        UnsupportedModel: the type has no format here.
        InvalidModelFile: a row is not a whole number of blocks, or ``data`` is not a whole number of rows.
    """
    quant_format = format_of(ggml_type)
    width = row_bytes(ggml_type, n_cols)
    if data.size % width:
        raise InvalidModelFile(f"{data.size} bytes are not a whole number of {ggml_type.name} rows of {width} bytes")
    if quant_format.split is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        parts = quant_format.split(data.reshape(-1, ggml_type.block_bytes).view(quant_format.block)[:, 0])
    n_rows, group = data.size // width, parts.q.shape[-1]
    minus = None if parts.minus is None else parts.minus.reshape(n_rows, -1)
    return Affine(parts.q.reshape(n_rows, -1, group), parts.scale.reshape(n_rows, -1), parts.zero, minus)


def quantizable_types() -> list[GgmlType]:
    """The types that weights can be rounded to, by id."""
    return sorted(ggml_type for ggml_type, quant_format in _formats().items() if quant_format.encode is not None)


def quantize(
    weights: NDArray[np.float32], ggml_type: GgmlType, importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Round the rows of a matrix to a type.

    Types of 32 weights without importance, Q8_0, Q1_0, TQ2_0 and floats are rounded like in ggml's reference
    quantizers; other types use our own search.

    Args:
        weights: float32 [n_rows, n_cols], C-contiguous.
        ggml_type: the target type.
        importance: float32 [n_cols], finite and not negative: the weight of each column's squared errors (the mean
            square of its inputs); None for equal weights.

    Returns:
        uint8 [n_bytes]: the blocks in the layout of a file.

    Raises:
        UnsupportedModel: quantizing to the type is not implemented, or a weight is too large for it.
        InvalidModelFile: a row is not a whole number of blocks, or a weight is infinite or not a number.
    """
    n_rows, n_cols = weights.shape
    packed = np.empty((n_rows, row_bytes(ggml_type, n_cols)), np.uint8)
    quant_format = format_of(ggml_type)
    step = max(1, _CHUNK_WEIGHTS // n_cols)
    for start in range(0, n_rows, step):
        rows = weights[start : start + step]
        if not np.isfinite(rows).all():
            raise InvalidModelFile(f"{np.count_nonzero(~np.isfinite(rows))} weights are infinite or not a number")
        counts = None if importance is None else np.broadcast_to(importance, rows.shape)
        packed[start : start + step] = _encode(quant_format, rows, counts).reshape(len(rows), -1)
    return packed.reshape(-1)


def _encode(
    quant_format: QuantFormat, rows: NDArray[np.float32], counts: NDArray[np.float32] | None
) -> NDArray[np.uint8]:
    width = quant_format.ggml_type.block_size
    return quant_format.quantize(rows.reshape(-1, width), None if counts is None else counts.reshape(-1, width))


def _expand(quant_format: QuantFormat, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    block_size = quant_format.ggml_type.block_size
    weights = np.empty((len(blocks), block_size), np.float32)
    step = _CHUNK_WEIGHTS // block_size
    for start in range(0, len(blocks), step):
        weights[start : start + step] = quant_format.dequantize(blocks[start : start + step])
    return weights
