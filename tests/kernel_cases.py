"""Products for check_products, the test of the C++ kernels that needs no Python.

python tests/kernel_cases.py FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from random_matrices import float32_bound, int8_values, random_matrix
from slm_core.gguf import GgmlType
from slm_core.quant import supported_types

WITHOUT_KERNELS = ("IQ1", "IQ2", "IQ3")
N_TOKENS = 70


def write_cases(path: Path) -> int:
    """Write products of every type that has a kernel, in odd sizes; return how many."""
    types = [t for t in supported_types() if not t.name.startswith(WITHOUT_KERNELS)]
    cases = [_case(t, n_out, n_blocks) for t in types for n_out, n_blocks in ((1, 1), (5, 3), (33, 11))]
    path.write_bytes(np.int32(len(cases)).tobytes() + b"".join(cases))
    return len(cases)


def _case(ggml_type: GgmlType, n_out: int, n_blocks: int) -> bytes:
    """Activations that int8 holds, so that nothing but float32 sums is rounded; 11 blocks of 32 are no whole spans."""
    matrix = random_matrix(ggml_type, n_out, n_blocks * max(32, ggml_type.block_size))
    x = int8_values(N_TOKENS, matrix.shape[1], seed=n_out)
    sizes = np.array([ggml_type, *matrix.shape, N_TOKENS, matrix.data.size], np.int32)
    wanted = x.astype(np.float64) @ matrix.exact.T
    return b"".join(part.tobytes() for part in (sizes, matrix.data, x, wanted, float32_bound(x, matrix)))


if __name__ == "__main__":
    sys.stdout.write(f"{write_cases(Path(sys.argv[1]))} cases\n")
