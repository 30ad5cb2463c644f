"""The C++ extension, built from csrc/."""

import numpy as np
from numpy.typing import NDArray

def available_isas() -> list[str]:
    """Instruction sets that this build has and this machine can run, the best last."""

class Kernels:
    """Kernels of one instruction set.

    Args:
        isa: one of ``available_isas()``; ValueError for any other.
    """

    def __init__(self, isa: str) -> None: ...
    def q8_0_matmul(self, x: NDArray[np.float32], weights: NDArray[np.uint8]) -> NDArray[np.float32]:
        """``x @ weights.T`` without the GIL: [T, in] to [T, out].

        Args:
            x: float32 [T, in], C-contiguous, in a multiple of 32.
            weights: uint8 [out * in / 32 * 34]: Q8_0 blocks, row by row, at any address.

        Raises:
            TypeError: a wrong dtype or device.
            ValueError: a wrong shape or layout.
        """
