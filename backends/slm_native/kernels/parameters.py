"""What the steps of a kernel set take besides activations."""

from __future__ import annotations

from dataclasses import dataclass

from slm_core.architectures import NormKind, RopeStyle
from slm_core.quant import QuantizedTensor
from slm_native.kv import Array


@dataclass(slots=True, eq=False)
class Weight:
    """A matrix that a kernel set has prepared; only that kernel set may use it, and tiers add fields of their own.

    Dropping the last reference to it frees whatever the tier holds for it, and its view on the mapped file.

    Attributes:
        tensor: the matrix as it lies in the file, (out, in).
    """

    tensor: QuantizedTensor

    @property
    def n_out(self) -> int:
        """Rows: the width of what the product gives."""
        return self.tensor.shape[0]

    @property
    def n_in(self) -> int:
        """Columns: the width of what the product takes."""
        return self.tensor.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A matrix and what its product is scaled by and shifted by."""

    weight: Weight  # (out, in)
    scale: Array | None = None  # [1]
    bias: Array | None = None  # [out]


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """How activations are normalized, and what they are multiplied with and shifted by then."""

    weight: Array  # [width], or [heads, D]
    bias: Array | None  # [width]
    kind: NormKind
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The angles by which the heads of a batch are rotated to their positions."""

    cos: Array  # [T, R/2]
    sin: Array  # [T, R/2]
    style: RopeStyle
