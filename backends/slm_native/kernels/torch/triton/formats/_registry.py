"""Collects the modules of formats."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

from slm_core.gguf import GgmlType
from slm_core.submodules import public_modules


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a kernel reads a block.

    A block is read in parts of consecutive weights: a scale is computed once for many weights, and the lanes of a
    kernel read consecutive bytes. Types without blocks are read in groups of 32 weights.

    Attributes:
        ggml_type: the type.
        block_size: weights of a block.
        block_bytes: bytes of a block.
        width: weights of a part, a power of two.
        part: Triton function ``part(blocks, P, j, mask)``. It returns the weights ``P * width + j`` as float32
            [R, N, width] for pointers to blocks [R, N, 1], a compile-time part number P, lanes j [1, 1, width] and a
            mask of existing blocks [R, N, 1].
    """

    ggml_type: GgmlType
    block_size: int
    block_bytes: int
    width: int
    part: Any

    @property
    def n_parts(self) -> int:
        """The number of parts of a block."""
        return self.block_size // self.width


@cache
def _formats() -> dict[GgmlType, PackedFormat]:
    return {GgmlType[name.upper()]: _format(GgmlType[name.upper()], name) for name in public_modules(__package__)}


def _format(ggml_type: GgmlType, name: str) -> PackedFormat:
    module = importlib.import_module(f"{__package__}.{name}")
    n_joined = 32 if ggml_type.block_size == 1 else 1
    size, n_bytes = ggml_type.block_size * n_joined, ggml_type.block_bytes * n_joined
    return PackedFormat(ggml_type, size, n_bytes, module.WIDTH, module.part)


def packed_types() -> list[GgmlType]:
    """The types that kernels read packed, sorted by id."""
    return sorted(_formats())


def packed_format(ggml_type: GgmlType, n_in: int) -> PackedFormat | None:
    """The format of rows of ``n_in`` weights of a type; None if kernels cannot read them."""
    triton_format = _formats().get(ggml_type)
    return None if triton_format is None or n_in % triton_format.block_size else triton_format
