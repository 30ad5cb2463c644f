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
        kernels: the tier's kernels.
        native: the layer.

    Attributes:
        native: the same.
    """

    def __init__(self, kernels: _native.Kernels, native: _native.Mixture) -> None:
        self._kernels = kernels
        self.native = native

    def run(self, x: Array, norm: Norm | None, router_input: Array | None = None) -> Array:
        """Without the GIL from the norm to the sum."""
        router_input = None if router_input is None else np.ascontiguousarray(router_input)
        y: Array = self._kernels.mix(np.ascontiguousarray(x), optional_norm(norm), router_input, self.native)
        return y


def native_moe(experts: Experts) -> _native.Mixture | None:
    """A layer in C++; None if one of its matrices has no kernel."""
    each, shared = experts.experts, experts.shared
    optional = () if shared is None else (shared.gate, shared.up, shared.down)
    linears = [experts.router, *(one.up for one in each), *(one.down for one in each)]
    linears += [
        linear for linear in (*(one.gate for one in each), *optional, experts.shared_gate) if linear is not None
    ]
    handles = [(id(linear), native_linear(linear)) for linear in linears]
    native_of = {key: native for key, native in handles if native is not None}
    if any(native is None for _, native in handles):
        return None
    mixture: _native.Mixture = extension().Mixture(
        native_of[id(experts.router)],
        experts.selection_bias,
        _choice(experts.spec),
        [native_of[id(one.gate)] for one in each if one.gate is not None],
        [native_of[id(one.up)] for one in each],
        [native_of[id(one.down)] for one in each],
        native_activation(experts.activation),
        experts.spec.scales_input,
        [native_of.get(id(linear)) for linear in optional],
        native_of.get(id(experts.shared_gate)),
    )
    return mixture


def _choice(spec: ExpertsSpec) -> _native.Choice:
    of, groups = extension().Choice.of, (spec.n_groups, spec.n_groups_used)
    choice: _native.Choice = of(spec.gating.value, spec.n_experts, spec.n_used, spec.normalized, spec.scale, *groups)
    return choice


class CpuPerHead(PerHead):
    """Matrices in C++.

    Args:
        kernels: the tier's kernels.
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
