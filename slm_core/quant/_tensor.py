"""A weight tensor in the layout of the model file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """One tensor of a GGUF file, in the file's blocks.

    Attributes:
        name: its name in the file ("blk.0.attn_q.weight").
        shape: row-major, slowest dimension first: (out, in) for a matrix. GGUF stores dimensions in reverse order.
        ggml_type: the format of the blocks.
        data: uint8 [n_bytes], C-contiguous; usually a view on the mapped file.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: GgmlType
    data: NDArray[np.uint8]
