"""Products for check_products, the test of the C++ kernels that needs no Python.

python tests/kernel_cases.py FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from random_matrices import bf16_of, float32_bound, int8_values, random_matrix
from slm_core.gguf import GgmlType
from slm_core.quant import supported_types

WITHOUT_KERNELS = ("IQ1", "IQ2", "IQ3")
N_TOKENS = 70
SHAPES = ((1, 1), (5, 3), (33, 11))
"""Rows, and blocks of a row, or of 32 weights where they are longer: 11 are no whole spans."""

LONG = ((GgmlType.Q4_0, 300, 35), (GgmlType.Q4_K, 300, 5), (GgmlType.Q6_K, 300, 5), (GgmlType.BF16, 300, 35))
"""Of which a matrix unit takes a row in parts, and several panels together."""


def write_cases(path: Path) -> int:
    """Write products of every type that has a kernel, in odd sizes; return how many."""
    types = [t for t in supported_types() if not t.name.startswith(WITHOUT_KERNELS)]
    cases = [_case(t, n_out, n_blocks) for t in types for n_out, n_blocks in SHAPES]
    cases += [_case(*shape) for shape in LONG]
    cases.append(_case(GgmlType.Q8_0, 33, 3, n_tokens=300))
    path.write_bytes(np.int32(len(cases)).tobytes() + b"".join(cases))
    return len(cases)


def _case(ggml_type: GgmlType, n_out: int, n_blocks: int, n_tokens: int = N_TOKENS) -> bytes:
    """Activations that int8 and bf16 hold, so that nothing but float32 sums is rounded; and weights, rounded to bf16.

    Of these a kernel may take one for its neighbour, where float32 has not all digits of what lies between the two.
    """
    matrix = random_matrix(ggml_type, n_out, n_blocks * max(32, ggml_type.block_size))
    x = int8_values(n_tokens, matrix.shape[1], seed=n_out)
    sizes = np.array([ggml_type, *matrix.shape, n_tokens, matrix.data.size], np.int32)
    wide, bound = x.astype(np.float64), float32_bound(x, matrix)
    largest = np.abs(x).max(axis=1)[:, np.newaxis] * np.abs(matrix.exact).max(axis=1)
    rounded = (wide @ bf16_of(matrix.exact).T, bound + largest * 2.0**-7)
    return b"".join(part.tobytes() for part in (sizes, matrix.data, x, wide @ matrix.exact.T, bound, *rounded))


if __name__ == "__main__":
    sys.stdout.write(f"{write_cases(Path(sys.argv[1]))} cases\n")
