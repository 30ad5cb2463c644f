"""The number formats of tensors."""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class GgmlType(IntEnum):
    """A ggml type id with the geometry of its packed blocks.

    A row of weights is a whole number of blocks; each block packs ``block_size`` weights into ``block_bytes`` bytes.
    Ids and sizes are from ggml (``ggml.h``, ``ggml-common.h``). Id 42 is llama.cpp's Q2_0; forks use the same id for
    other layouts, which the reader detects by size and refuses.

    Attributes:
        block_size: weights per block.
        block_bytes: bytes per block.
    """

    _value_: int
    block_size: int
    block_bytes: int

    # The defaults are never used: they let type checkers accept the lookup of a member by its id, GgmlType(8).
    def __new__(cls, type_id: int, block_size: int = 0, block_bytes: int = 0) -> Self:
        """Make a member from its id and geometry."""
        member = int.__new__(cls, type_id)
        member._value_ = type_id
        member.block_size = block_size
        member.block_bytes = block_bytes
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 36
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18
    Q2_0 = 42, 64, 18


REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Ids that ggml no longer uses."""
