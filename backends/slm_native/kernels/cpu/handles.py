"""Arguments of C++ calls: handles on weights in the file, and parameters of operations."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import AnyActivation, NormKind, Xielu
from slm_native import _extension
from slm_native.kernels.parameters import Linear, Lora, Norm
from slm_native.kernels.reference import ReferenceWeight
from slm_native.kv import Array

if TYPE_CHECKING:
    from slm_native import _native


@dataclass(slots=True, eq=False)
class CpuWeight(ReferenceWeight):
    """A matrix, and a C++ handle on the same bytes if its type has kernels.

    Attributes:
        packed: the handle.
        last: the most recent ``native_linear`` of this matrix, with its scale and bias as the key.
    """

    packed: _native.Weights | None = None
    last: tuple[Array | None, Array | None, _native.Linear] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CpuLora(Lora):
    """A low-rank change, and its matrices as C++ reads them.

    Attributes:
        rows: ``a`` (r', in); r' is r, or 2 r if ``a`` is repeated because ``b`` is a sum of two matrices.
        columns: ``b.T`` in blocks of 256 columns, one after the other, as the bits of float16 [r' * out].
        cached: the linear in C++; empty until its first use. A change belongs to one linear.
    """

    rows: CpuWeight
    columns: NDArray[np.uint16]
    cached: list[_native.Linear]

    def native_linear(self, packed: _native.Weights, linear: Linear) -> _native.Linear:
        """The linear in C++."""
        if not self.cached:
            scale = 1.0 if linear.scale is None else float(linear.scale[0])
            self.cached.append(extension().Linear(packed, scale, linear.bias, self.rows.packed, self.columns))
        return self.cached[0]


@functools.cache
def extension() -> ModuleType:
    """The extension, imported once; only called if it exists."""
    return _extension.load()


def handle_of(linear: Linear) -> _native.Weights | None:
    """The matrix in C++; None if the linear has a scale or an adapter's change."""
    assert isinstance(linear.weight, CpuWeight), "a weight that another kernel set prepared"
    return linear.weight.packed if linear.scale is None and linear.lora is None else None


def plain_handles(*linears: Linear) -> list[_native.Weights] | None:
    """All matrices in C++; None if one has no kernel, or has a scale, a bias or an adapter's change."""
    handles = [handle for linear in linears if linear.bias is None and (handle := handle_of(linear)) is not None]
    return handles if len(handles) == len(linears) else None


def native_linear(linear: Linear) -> _native.Linear | None:
    """A linear in C++; None if its matrix has no kernel."""
    assert isinstance(linear.weight, CpuWeight), "a weight that another kernel set prepared"
    weight, last, lora = linear.weight, linear.weight.last, linear.lora
    if weight.packed is None:
        return None
    if lora is not None:
        return lora.native_linear(weight.packed, linear) if isinstance(lora, CpuLora) else None
    if last is not None and last[0] is linear.scale and last[1] is linear.bias:
        return last[2]
    scale = 1.0 if linear.scale is None else float(linear.scale[0])
    native: _native.Linear = extension().Linear(weight.packed, scale, linear.bias, None, None)
    weight.last = linear.scale, linear.bias, native
    return native


def changed_linears(*linears: Linear | None) -> bool:
    """Whether an adapter changes one of the matrices."""
    return any(linear is not None and linear.lora is not None for linear in linears)


def native_linears(*linears: Linear | None) -> list[_native.Linear | None] | None:
    """Linears in C++, with None for absent ones; None instead of the list if a matrix has no kernel."""
    natives = [None if linear is None else native_linear(linear) for linear in linears]
    is_complete = all(handle is not None or linear is None for handle, linear in zip(natives, linears, strict=True))
    return natives if is_complete else None


def native_norm(norm: Norm) -> _native.Norm:
    """A norm in C++."""
    native: _native.Norm = extension().Norm.of(norm.weight, norm.bias, norm.eps, norm.kind is NormKind.LAYER)
    return native


def optional_norm(norm: Norm | None) -> _native.Norm | None:
    """A norm in C++; None if there is none."""
    return None if norm is None else native_norm(norm)


def native_activation(activation: AnyActivation) -> _native.Activation:
    """An activation in C++."""
    of = extension().Activation.of
    if isinstance(activation, Xielu):
        native: _native.Activation = of(
            "xielu", [activation.alpha_n, activation.alpha_p, activation.beta, activation.eps]
        )
    else:
        native = of(activation.value, [])
    return native
