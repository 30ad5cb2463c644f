"""``general.file_type``: the number format of most weights of a file, with the numbers of llama.cpp (``llama.h``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from slm_core.gguf.ggml_types import GgmlType

FILE_TYPE = "general.file_type"
_NUMBERS = {
    GgmlType.F32: 0,
    GgmlType.F16: 1,
    GgmlType.BF16: 32,
    GgmlType.Q8_0: 7,
    GgmlType.Q6_K: 18,
    GgmlType.Q5_K: 16,
    GgmlType.Q5_1: 9,
    GgmlType.Q5_0: 8,
    GgmlType.Q4_K: 14,
    GgmlType.Q4_1: 3,
    GgmlType.Q4_0: 2,
    GgmlType.Q3_K: 11,
    GgmlType.Q2_K: 10,
    GgmlType.IQ4_XS: 30,
    GgmlType.IQ4_NL: 25,
    GgmlType.IQ3_S: 26,
    GgmlType.IQ3_XXS: 23,
    GgmlType.IQ2_S: 28,
    GgmlType.IQ2_XS: 20,
    GgmlType.IQ2_XXS: 19,
    GgmlType.IQ1_M: 31,
    GgmlType.IQ1_S: 24,
    GgmlType.TQ2_0: 37,
    GgmlType.TQ1_0: 36,
    GgmlType.MXFP4: 38,
    GgmlType.NVFP4: 39,
    GgmlType.Q2_0: 41,
    GgmlType.Q1_0: 40,
}
"""If llama.cpp has several recipes for one type, the number of the smallest one ("S")."""


def main_type(tensors: Iterable[tuple[GgmlType, int]]) -> GgmlType:
    """The type of most weights.

    Args:
        tensors: the type of each tensor, and its number of elements; at least one.
    """
    n_elements: Counter[GgmlType] = Counter()
    for kind, n in tensors:
        n_elements[kind] += n
    return max(n_elements, key=lambda kind: n_elements[kind])


def file_type(kind: GgmlType) -> int:
    """The file type of a file with this main type; 0, the number of F32, if the type has no number."""
    return _NUMBERS.get(kind, 0)
