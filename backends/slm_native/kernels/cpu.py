"""The cpu tier: C++ kernels that read the file's blocks as they lie there, NumPy for what they do not cover yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slm_core.errors import InvalidOption
from slm_core.gguf import GgmlType
from slm_native import _extension
from slm_native.kernels.kernelset import FloatArray, Weight
from slm_native.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from slm_native import _native

# Up to this many activation rows a product costs less than expanding the weights, or than reading them expanded.
_MATVEC_ROWS = 8


class CpuKernels(ReferenceKernels):
    """The reference kernels, with products of a few rows and Q8_0 weights in C++.

    The C++ product keeps activations in float32 and expands no weights; it differs from the reference in the order of
    its sums only.

    Args:
        isa: instruction set, None for the best that this machine has.
        expanded_bytes: see ``ReferenceKernels``.

    Raises:
        InvalidOption: an instruction set that is unknown, or that this machine or this build lacks.
        BackendUnavailable: the extension is missing or broken.
    """

    name = "cpu"

    def __init__(self, isa: str | None, expanded_bytes: int) -> None:
        super().__init__(expanded_bytes)
        native = _extension.load()
        available: list[str] = native.available_isas()
        if isa is not None and isa not in available:
            raise InvalidOption(
                f"unknown or missing instruction set {isa!r} (this build on this machine has: {', '.join(available)})"
            )
        self.isa = isa if isa is not None else available[-1]
        self._native: _native.Kernels = native.Kernels(self.isa)

    def describe(self) -> str:
        """The instruction set, and what the reference does."""
        return f"C++ kernels ({self.isa}) for Q8_0 products of up to {_MATVEC_ROWS} rows; else {super().describe()}"

    def matmul(self, x: FloatArray, weight: Weight, bias: FloatArray | None = None) -> FloatArray:
        """In C++ for a few rows and Q8_0 weights, else as the reference does."""
        tensor = weight.tensor
        if tensor.ggml_type is not GgmlType.Q8_0 or len(x) > _MATVEC_ROWS:
            return super().matmul(x, weight, bias)
        y = self._native.q8_0_matmul(np.ascontiguousarray(x), tensor.data)
        if bias is not None:
            y += bias
        return y
