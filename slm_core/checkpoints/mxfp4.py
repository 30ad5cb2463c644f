"""MXFP4 weights: FP4 codes, ``..._blocks``, and a power of two for each 32 of them, ``..._scales``.

The format is MXFP4 of the OCP Microscaling Formats (MX) Specification 1.0. GGUF uses the same numbers in another
layout, so reading only moves bits. A byte of a directory holds the codes of two adjacent weights, and scales are in
another tensor. A GGUF block begins with its scale, and a byte of it holds the codes of weights j and j + 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slm_core.checkpoints.safetensors import StoredTensor
from slm_core.errors import InvalidModelFile
from slm_core.gguf import GgmlType
from slm_core.gguf.cursor import shown

BLOCKS = "_blocks"
_SCALES = "_scales"
_TYPE = GgmlType.MXFP4
_CODE_BYTES = _TYPE.block_size // 2


def scales_of(name: str) -> str:
    """The tensor with the scales of codes."""
    return name.removesuffix(BLOCKS) + _SCALES


def find_packed(folder: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of dequantized tensors, by the names of their tensors of codes.

    Raises:
        InvalidModelFile: scales are missing, or have the wrong shape.
    """
    shapes = {}
    for name, blocks in tensors.items():
        if not name.endswith(BLOCKS) or blocks.dtype != "U8":
            continue
        scales = tensors.get(scales_of(name))
        if scales is None or scales.dtype != "U8" or blocks.shape != (*scales.shape, _CODE_BYTES):
            about = "is missing" if scales is None else f"has {scales.shape} of {scales.dtype}"
            raise InvalidModelFile(
                f"{folder}: tensor {shown(name)} has the shape {blocks.shape}, and {shown(scales_of(name))} {about}"
                f" (accepted: a U8 for each {_CODE_BYTES} bytes of codes)"
            )
        if len(scales.shape) < 2:
            raise InvalidModelFile(
                f"{folder}: tensor {shown(name)} has the shape {blocks.shape}, which is not a matrix"
            )
        shapes[name] = (*scales.shape[:-1], scales.shape[-1] * _TYPE.block_size)
    return shapes


def interleave(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """GGUF's blocks, uint8 [..., n_blocks * 17], from codes [..., n_blocks, 16] and scales [..., n_blocks]."""
    packed = np.empty((*scales.shape, _TYPE.block_bytes), np.uint8)
    packed[..., 0] = scales
    even, odd = blocks & 15, blocks >> 4  # weights 0, 2, 4, ... and 1, 3, 5, ...
    half = _CODE_BYTES // 2
    packed[..., 1::2] = even[..., :half] | even[..., half:] << 4
    packed[..., 2::2] = odd[..., :half] | odd[..., half:] << 4
    return packed.reshape(*scales.shape[:-1], -1)
