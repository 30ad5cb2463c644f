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
        terms: Triton function ``terms(blocks, S, j, mask)``, for formats whose weights are ``value * scale - offset``.
            It returns value, scale and offset of the weights ``columns[S][0] + j``, then of ``columns[S][1] + j``: the
            low and the high nibbles of ``width`` bytes. Values are float32 [R, N, width], scales and offsets [R, N, 1].
            None for other formats.
        per_thread: consecutive values that a thread has, with ``terms``; otherwise 1.
        columns: the first column of each step of a block, see ``terms``; without it, of each part.
    """

    ggml_type: GgmlType
    block_size: int
    block_bytes: int
    width: int
    part: Any
    terms: Any | None
    per_thread: int
    columns: tuple[tuple[int, ...], ...]

    @property
    def n_parts(self) -> int:
        """The number of parts of a block."""
        return self.block_size // self.width


_WITH_TERMS = ("q4_k", "q5_k")
"""The modules with ``terms``, ``PER_THREAD`` and ``COLUMNS``, see ``PackedFormat``."""


@cache
def _formats() -> dict[GgmlType, PackedFormat]:
    return {GgmlType[name.upper()]: _format(GgmlType[name.upper()], name) for name in public_modules(__package__)}


def _format(ggml_type: GgmlType, name: str) -> PackedFormat:
    module = importlib.import_module(f"{__package__}.{name}")
    n_joined = 32 if ggml_type.block_size == 1 else 1
    size, n_bytes = ggml_type.block_size * n_joined, ggml_type.block_bytes * n_joined
    if name in _WITH_TERMS:
        terms = module.terms, module.PER_THREAD, module.COLUMNS
    else:
        terms = None, 1, tuple((start,) for start in range(0, size, module.WIDTH))
    return PackedFormat(ggml_type, size, n_bytes, module.WIDTH, module.part, *terms)


def packed_types() -> list[GgmlType]:
    """The types that kernels read packed, sorted by id."""
    return sorted(_formats())


def packed_format(ggml_type: GgmlType, n_in: int) -> PackedFormat | None:
    """The format of rows of ``n_in`` weights of a type; None if kernels cannot read them."""
    triton_format = _formats().get(ggml_type)
    return None if triton_format is None or n_in % triton_format.block_size else triton_format
