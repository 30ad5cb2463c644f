"""A weight tensor as it lies in the model file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slm_core.gguf import GgmlType


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """One tensor of a GGUF file, still in the file's own blocks.

    Attributes:
        name: as the file spells it ("blk.0.attn_q.weight").
        shape: row-major, slowest dimension first: (out, in) for a matrix. GGUF stores its dims the other way round.
        ggml_type: the format of the blocks.
        data: uint8 [n_bytes], C-contiguous; usually a view on the mapped file.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: GgmlType
    data: NDArray[np.uint8]
