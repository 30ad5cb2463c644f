"""Parameters of steps as C++ has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slm_core.architectures import AnyActivation, NormKind, Xielu
from slm_native.kernels.cpu_weights import extension
from slm_native.kernels.parameters import Norm

if TYPE_CHECKING:
    from slm_native import _native


def native_norm(norm: Norm) -> _native.Norm:
    """A norm in C++."""
    made: _native.Norm = extension().Norm.of(norm.weight, norm.bias, norm.eps, norm.kind is NormKind.LAYER)
    return made


def optional_norm(norm: Norm | None) -> _native.Norm | None:
    """Likewise, where there is one."""
    return None if norm is None else native_norm(norm)


def native_activation(activation: AnyActivation) -> _native.Activation:
    """An activation in C++."""
    of = extension().Activation.of
    if isinstance(activation, Xielu):
        made: _native.Activation = of(
            "xielu", [activation.alpha_n, activation.alpha_p, activation.beta, activation.eps]
        )
    else:
        made = of(activation.value, [])
    return made
