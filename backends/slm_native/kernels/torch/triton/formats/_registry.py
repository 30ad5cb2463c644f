"""Finds the formats."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import Any

from slm_core.gguf import GgmlType
from slm_native.kernels.torch.triton import formats


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a kernel takes a block apart.

    A block is read in parts of consecutive weights, so that a scale is computed once for many weights and a kernel's
    lanes read consecutive bytes. Types without blocks are read as if 32 weights were one.

    Attributes:
        ggml_type: the type.
        block_size: weights of a block.
        block_bytes: bytes of a block.
        width: weights of a part, a power of two.
        part: Triton function ``part(blocks, P, j, mask)``: weights ``P * width + j`` as float32 [R, N, width], from
            pointers to blocks [R, N, 1], a part number that is known at compile time, lanes [1, 1, width] and which
            blocks there are [R, N, 1].
    """

    ggml_type: GgmlType
    block_size: int
    block_bytes: int
    width: int
    part: Any

    @property
    def n_parts(self) -> int:
        """Parts of a block."""
        return self.block_size // self.width


@cache
def _formats() -> dict[GgmlType, PackedFormat]:
    names = [module.name for module in pkgutil.iter_modules(formats.__path__) if not module.name.startswith("_")]
    return {GgmlType[name.upper()]: _format(GgmlType[name.upper()], name) for name in names}


def _format(ggml_type: GgmlType, name: str) -> PackedFormat:
    module = importlib.import_module(f"{formats.__name__}.{name}")
    n_joined = 32 if ggml_type.block_size == 1 else 1
    size, n_bytes = ggml_type.block_size * n_joined, ggml_type.block_bytes * n_joined
    return PackedFormat(ggml_type, size, n_bytes, module.WIDTH, module.part)


def packed_types() -> list[GgmlType]:
    """The types that kernels read packed, by id."""
    return sorted(_formats())


def packed_format(ggml_type: GgmlType, n_in: int) -> PackedFormat | None:
    """How kernels read rows of ``n_in`` weights of a type; None if they cannot."""
    triton_format = _formats().get(ggml_type)
    return None if triton_format is None or n_in % triton_format.block_size else triton_format
