"""Layers that are prepared once and are one call into C++: MoE layers, and matrices of each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from slm_core.architectures import ExpertsSpec
from slm_native.kernels.cpu.handles import extension, native_activation, native_linear, optional_norm
from slm_native.kernels.moe import MoeLayer
from slm_native.kernels.parameters import Experts, Norm, PerHead
from slm_native.kv import Array

if TYPE_CHECKING:
    from slm_native import _native


class CpuMoe(MoeLayer):
    """A layer in C++.

    Args:
        kernels: what computes.
        native: the layer.

    Attributes:
        native: the same.
    """

    def __init__(self, kernels: _native.Kernels, native: _native.Mixture) -> None:
        self._kernels = kernels
        self.native = native

    def run(self, x: Array, norm: Norm | None, told: Array | None = None) -> Array:
        """Without the GIL from the norm to the sum."""
        told = None if told is None else np.ascontiguousarray(told)
        y: Array = self._kernels.mix(np.ascontiguousarray(x), optional_norm(norm), told, self.native)
        return y


def native_moe(experts: Experts) -> _native.Mixture | None:
    """A layer in C++; None where there are no kernels for one of its matrices."""
    each, shared = experts.experts, experts.shared
    optional = () if shared is None else (shared.gate, shared.up, shared.down)
    wanted = [experts.router, *(one.up for one in each), *(one.down for one in each)]
    wanted += [linear for linear in (*(one.gate for one in each), *optional, experts.shared_gate) if linear is not None]
    found = [(id(linear), native_linear(linear)) for linear in wanted]
    made = {key: native for key, native in found if native is not None}
    if any(native is None for _, native in found):
        return None
    mixture: _native.Mixture = extension().Mixture(
        made[id(experts.router)],
        experts.selection_bias,
        _choice(experts.spec),
        [made[id(one.gate)] for one in each if one.gate is not None],
        [made[id(one.up)] for one in each],
        [made[id(one.down)] for one in each],
        native_activation(experts.activation),
        experts.spec.scales_input,
        [made.get(id(linear)) for linear in optional],
        made.get(id(experts.shared_gate)),
    )
    return mixture


def _choice(spec: ExpertsSpec) -> _native.Choice:
    of, groups = extension().Choice.of, (spec.n_groups, spec.n_groups_used)
    made: _native.Choice = of(spec.gating.value, spec.n_experts, spec.n_used, spec.normalized, spec.scale, *groups)
    return made


class CpuPerHead(PerHead):
    """Matrices in C++.

    Args:
        kernels: what computes.
        weights: of the heads [H].

    Attributes:
        weights: the same.
    """

    def __init__(self, kernels: _native.Kernels, weights: Sequence[_native.Weights]) -> None:
        super().__init__(len(weights))
        self._kernels = kernels
        self.weights = list(weights)

    def run(self, x: Array) -> Array:
        """Without the GIL."""
        y: Array = self._kernels.by_head(np.ascontiguousarray(x), self.weights)
        return y
