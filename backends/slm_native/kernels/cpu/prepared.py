"""Layers that are prepared once and run as one call into C++: MoE layers, and a matrix for each head."""

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
    """An MoE layer in C++.

    Args:
        kernels: the tier's kernels.
        native: the layer.

    Attributes:
        native: the layer.
    """

    def __init__(self, kernels: _native.Kernels, native: _native.MoeLayer) -> None:
        self._kernels = kernels
        self.native = native

    def run(self, x: Array, norm: Norm | None, router_input: Array | None = None) -> Array:
        """Runs without the GIL from the norm to the sum."""
        router_input = None if router_input is None else np.ascontiguousarray(router_input)
        y: Array = self._kernels.run_moe(np.ascontiguousarray(x), optional_norm(norm), router_input, self.native)
        return y


def native_moe(experts: Experts) -> _native.MoeLayer | None:
    """An MoE layer in C++; None if one of its matrices has no kernel."""
    weights, shared = experts.experts, experts.shared
    optional = () if shared is None else (shared.gate, shared.up, shared.down)
    linears = [experts.router, *(expert.up for expert in weights), *(expert.down for expert in weights)]
    linears += [
        linear
        for linear in (*(expert.gate for expert in weights), *optional, experts.shared_gate)
        if linear is not None
    ]
    handles = [(id(linear), native_linear(linear)) for linear in linears]
    native_of = {key: native for key, native in handles if native is not None}
    if any(native is None for _, native in handles):
        return None
    moe: _native.MoeLayer = extension().MoeLayer(
        native_of[id(experts.router)],
        experts.selection_bias,
        _routing(experts.spec),
        [native_of[id(expert.gate)] for expert in weights if expert.gate is not None],
        [native_of[id(expert.up)] for expert in weights],
        [native_of[id(expert.down)] for expert in weights],
        native_activation(experts.activation),
        experts.spec.scales_input,
        [native_of.get(id(linear)) for linear in optional],
        native_of.get(id(experts.shared_gate)),
    )
    return moe


def _routing(spec: ExpertsSpec) -> _native.RoutingOptions:
    of, groups = extension().RoutingOptions.of, (spec.n_groups, spec.n_groups_used)
    options: _native.RoutingOptions = of(
        spec.gating.value, spec.n_experts, spec.n_used, spec.normalized, spec.scale, *groups
    )
    return options


class CpuPerHead(PerHead):
    """A matrix for each head in C++.

    Args:
        kernels: the tier's kernels.
        weights: the matrices of the heads [H].

    Attributes:
        weights: the matrices of the heads [H].
    """

    def __init__(self, kernels: _native.Kernels, weights: Sequence[_native.Weights]) -> None:
        super().__init__(len(weights))
        self._kernels = kernels
        self.weights = list(weights)

    def run(self, x: Array) -> Array:
        """Runs without the GIL."""
        y: Array = self._kernels.multiply_per_head(np.ascontiguousarray(x), self.weights)
        return y
