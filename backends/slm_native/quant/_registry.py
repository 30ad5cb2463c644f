"""Finds the formats and applies them to whole tensors."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgmlType
from slm_native import quant
from slm_native.quant._format import QuantFormat

# Weights expanded at a time: what an expansion allocates on the way stays within the processor's cache.
_CHUNK_WEIGHTS = 1 << 16


@cache
def _formats() -> Mapping[GgmlType, QuantFormat]:
    names = [module.name for module in pkgutil.iter_modules(quant.__path__) if not module.name.startswith("_")]
    found: list[QuantFormat] = [importlib.import_module(f"{quant.__name__}.{name}").FORMAT for name in names]
    return MappingProxyType({quant_format.ggml_type: quant_format for quant_format in found})


def supported_types() -> list[GgmlType]:
    """The types that can be dequantized, by id."""
    return sorted(_formats())


def format_of(ggml_type: GgmlType) -> QuantFormat:
    """The format of a type.

    Raises:
        UnsupportedModel: there is none; the message lists those there are.
    """
    found = _formats().get(ggml_type)
    if found is None:
        accepted = ", ".join(t.name for t in supported_types())
        raise UnsupportedModel(f"cannot dequantize tensor type {ggml_type.name} (supported: {accepted})")
    return found


def row_bytes(ggml_type: GgmlType, n_cols: int) -> int:
    """Bytes of one row of ``n_cols`` weights.

    Raises:
        InvalidModelFile: a row is no whole number of blocks.
    """
    n_blocks, rest = divmod(n_cols, ggml_type.block_size)
    if rest or n_cols < 1:
        raise InvalidModelFile(
            f"a row of {n_cols} weights is no whole number of {ggml_type.name} blocks of {ggml_type.block_size}"
        )
    return n_blocks * ggml_type.block_bytes


def check_tensor(data: NDArray[np.uint8], ggml_type: GgmlType, shape: Sequence[int]) -> None:
    """Check that ``data`` can be dequantized to ``shape``.

    Raises:
        UnsupportedModel: the type has no format here.
        InvalidModelFile: rows are no whole number of blocks, or ``data`` has the wrong size.
    """
    format_of(ggml_type)
    expected = math.prod(shape[:-1]) * row_bytes(ggml_type, shape[-1])
    if data.size != expected:
        raise InvalidModelFile(
            f"{ggml_type.name} weights of shape {tuple(shape)} take {expected} bytes, got {data.size}"
        )


def dequantize(data: NDArray[np.uint8], ggml_type: GgmlType, shape: Sequence[int]) -> NDArray[np.float32]:
    """Expand a whole tensor.

    Args:
        data: uint8 [n_bytes], C-contiguous: the blocks as they lie in the file.
        ggml_type: their type.
        shape: row-major, slowest dimension first.

    Returns:
        A new float32 array of that shape.

    Raises:
        UnsupportedModel: the type has no format here.
        InvalidModelFile: rows are no whole number of blocks, or ``data`` has the wrong size.
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
        row_ids: [T] rows to expand, in the order wanted, repeats allowed.

    Returns:
        float32 [T, n_cols].

    Raises:
        UnsupportedModel: the type has no format here.
        InvalidModelFile: a row is no whole number of blocks, or ``data`` no whole number of rows.
        IndexError: a row outside the matrix.
    """
    quant_format = format_of(ggml_type)
    width = row_bytes(ggml_type, n_cols)
    if data.size % width:
        raise InvalidModelFile(f"{data.size} bytes are no whole number of {ggml_type.name} rows of {width} bytes")
    rows = data.reshape(-1, width)
    if row_ids.size and not 0 <= row_ids.min() <= row_ids.max() < len(rows):
        raise IndexError(f"row ids span {row_ids.min()} to {row_ids.max()}, the matrix has rows 0 to {len(rows) - 1}")
    return _expand(quant_format, rows[row_ids].reshape(-1, ggml_type.block_bytes)).reshape(-1, n_cols)


def _expand(quant_format: QuantFormat, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    block_size = quant_format.ggml_type.block_size
    weights = np.empty((len(blocks), block_size), np.float32)
    step = _CHUNK_WEIGHTS // block_size
    for start in range(0, len(blocks), step):
        weights[start : start + step] = quant_format.dequantize(blocks[start : start + step])
    return weights
