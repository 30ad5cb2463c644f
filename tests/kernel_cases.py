"""Products for check_products, the test of the C++ kernels without Python.

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
"""Rows, and blocks per row (of at least 32 weights): 11 blocks do not fill whole spans."""

LONG = ((GgmlType.Q4_0, 300, 35), (GgmlType.Q4_K, 300, 5), (GgmlType.Q6_K, 300, 5), (GgmlType.BF16, 300, 35))
"""Shapes for which a matrix unit splits a row, and processes several panels together."""


FEW = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
"""Types of each kind of kernel: floats, blocks of 32 weights with and without panels, blocks of 256."""


def write_cases(path: Path, *, all_types: bool = True) -> int:
    """Write products of every type that has a kernel, or of ``FEW``, in odd sizes; return how many."""
    types = [t for t in supported_types() if not t.name.startswith(WITHOUT_KERNELS)]
    types = types if all_types else [t for t in types if t.name in FEW]
    cases = [_case(t, n_out, n_blocks) for t in types for n_out, n_blocks in SHAPES]
    cases += [_case(*shape, n_tokens=40) for shape in LONG]
    cases.append(_case(GgmlType.Q8_0, 33, 3, n_tokens=300))
    path.write_bytes(np.int32(len(cases)).tobytes() + b"".join(cases))
    return len(cases)


def _case(ggml_type: GgmlType, n_out: int, n_blocks: int, n_tokens: int = N_TOKENS) -> bytes:
    """A product of activations that are exact in int8 and bf16, so that only float32 sums are rounded.

    The case also has the product with weights rounded to bf16. A kernel may round a weight to the neighbouring bf16 if
    float32 cannot represent its exact value.
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
