"""FP8 weights (E4M3) with their scales: for the whole matrix, for each row, or for each block.

They are read as BF16: the product of a code and its scale, rounded to nearest. DeepSeek's own script converts them in
the same way (https://github.com/deepseek-ai/DeepSeek-V3/blob/main/inference/fp8_cast_bf16.py). The format is E4M3 of
https://arxiv.org/abs/2209.05433: no infinities, one NaN of each sign.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_core.checkpoints.safetensors import ITEM_BYTES, StoredTensor
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgmlType
from slm_core.gguf.cursor import shown
from slm_core.quant import dequantize, quantize

DTYPE = "F8_E4M3"
_SCALES = ("_scale_inv", "_scale")
_SCALING = re.compile(r"\.(weight_scale|weight_scale_inv|(input|output|k|v|q|prob)_scale|activation_scale)$")
_SCALE_TYPES = {"F32": GgmlType.F32, "BF16": GgmlType.BF16, "F16": GgmlType.F16}
_BLOCK = 128


def find_scales(folder: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """The name of the scales of each FP8 matrix.

    Raises:
        InvalidModelFile: scales are missing, or have the wrong shape.
        UnsupportedModel: scales have an unknown type.
    """
    scale_names = {}
    for name, tensor in tensors.items():
        if tensor.dtype != DTYPE:
            continue
        scale = next((name + suffix for suffix in _SCALES if name + suffix in tensors), None)
        if scale is None:
            raise InvalidModelFile(
                f"{folder}: tensor {shown(name)} is of type {DTYPE}, but {shown(name + _SCALES[0])} is missing"
            )
        if tensors[scale].dtype not in _SCALE_TYPES:
            raise UnsupportedModel(
                f"{folder}: tensor {shown(scale)} is of type {tensors[scale].dtype}"
                f" (accepted: {', '.join(_SCALE_TYPES)})"
            )
        _check_fit(f"{folder}: tensor {shown(name)}", tensor.shape, tensors[scale].shape)
        scale_names[name] = scale
    return scale_names


def scaling_tensors(tensors: Mapping[str, StoredTensor], scales: Mapping[str, str]) -> set[str]:
    """The tensors that belong to FP8 matrices: scales of weights, activations and caches."""
    return {name for name in tensors if _SCALING.search(name)} if scales else set()


def expand(codes: NDArray[np.uint8], stored: NDArray[np.uint8], scale: StoredTensor) -> NDArray[np.uint16]:
    """The bits of the BF16 nearest to each code times its scale.

    Args:
        codes: (out, in).
        stored: bytes of the scales.
        scale: their type and shape.
    """
    numbers = dequantize(stored, _SCALE_TYPES[scale.dtype], (stored.size // ITEM_BYTES[scale.dtype],))
    scales = numbers.reshape(scale.shape if len(scale.shape) == 2 else (-1, 1))
    rows, columns = (_places(n, n_scales) for n, n_scales in zip(codes.shape, scales.shape, strict=True))
    bits = np.empty(codes.shape, np.uint16)
    for start in range(0, len(codes), _BLOCK):  # in bands of rows, because the computation needs eight bytes per code
        band = slice(start, start + _BLOCK)
        products = VALUES[codes[band]] * scales[rows[band]][:, columns]
        bits[band] = quantize(products, GgmlType.BF16).view(np.uint16).reshape(products.shape)
    return bits


def _places(n: int, n_scales: int) -> NDArray[np.intp]:
    """The index of each row's (or column's) scale: one per row, one per block, or one in all."""
    return np.minimum(np.arange(n) // (1 if n_scales == n else _BLOCK), n_scales - 1)


def _check_fit(what: str, shape: tuple[int, ...], scales: tuple[int, ...]) -> None:
    """Check that there is one scale, one per row, or one per block of 128 by 128."""
    accepted = [(), (1,), (1, 1)]
    if len(shape) == 2:
        accepted += [shape[:1], (shape[0], 1), (-(-shape[0] // _BLOCK), -(-shape[1] // _BLOCK))]
    if len(shape) != 2 or scales not in accepted:
        raise InvalidModelFile(
            f"{what} of type {DTYPE} has the shape {shape}, and its scales have {scales}"
            f" (accepted: a matrix, and one scale, one for each row, or one for each block of {_BLOCK} by {_BLOCK})"
        )


def _values() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[codes & 127 == 127] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


VALUES = _values()
"""The number of each code [256]."""
