"""MoE layers: each token uses a few experts, and each expert runs once for all tokens that selected it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import ExpertsSpec, Gating
from slm_native.kernels.device import Device, FloatArray
from slm_native.kernels.ops import Ops
from slm_native.kernels.parameters import Experts, Norm
from slm_native.kv import Array

_NEAR = 0.02  # twice the noise in the training of Phi 3.5 MoE; model files do not contain it


class Routes(NamedTuple):
    """The selected experts of a batch's tokens.

    Attributes:
        experts: the experts of each token [T, n_used].
        weights: their weights, float32 [T, n_used].
    """

    experts: NDArray[np.intp]
    weights: FloatArray


def route(scores: FloatArray, spec: ExpertsSpec, selection_bias: FloatArray | None) -> Routes:
    """Select the experts of each token.

    Args:
        scores: the router's output [T, X].
        spec: the selection rule.
        selection_bias: added to the scores for selection, but not to the weights (DeepSeek-V3), [X].
    """
    shares = _shares(scores, spec.gating)
    ranked = shares if selection_bias is None else shares + selection_bias
    if spec.n_groups > 1:
        ranked = _in_best_groups(ranked, spec)
    chosen = np.argsort(-ranked, axis=1, kind="stable")[:, : spec.n_used]
    weights = np.take_along_axis(shares, chosen, axis=1)
    if spec.gating is Gating.SPARSE_MIXER:
        weights = _mixed_sparsely(scores, chosen)
    if spec.gating is Gating.SOFTMAX_OF_CHOSEN:
        weights = _softmax(weights)
    if spec.normalized:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return Routes(chosen, weights * np.float32(spec.scale))


def _in_best_groups(ranked: FloatArray, spec: ExpertsSpec) -> FloatArray:
    """The scores for selection [T, X], restricted to the groups whose two best experts have the largest sums."""
    groups = ranked.reshape(len(ranked), spec.n_groups, -1)
    sums = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
    best = np.argsort(-sums, axis=1, kind="stable")[:, : spec.n_groups_used]
    is_best = np.zeros(sums.shape, np.bool_)
    np.put_along_axis(is_best, best, True, axis=1)
    return np.where(is_best[:, :, None], groups, -np.inf).reshape(ranked.shape)


class MoeLayer(ABC):
    """A prepared MoE layer. Immutable, so threads may share it."""

    @abstractmethod
    def run(self, x: Array, norm: Norm | None, router_input: Array | None = None) -> Array:
        """The weighted sum of the outputs of each token's experts; only selected experts are run.

        Args:
            x: [T, E].
            norm: norm of the experts' input.
            router_input: the router's input [T, E], if it differs from the experts' input.

        Returns:
            [T, E].
        """


class SteppedMoe(MoeLayer):
    """An MoE layer as single operations of any kernel set, with routing in NumPy.

    Args:
        ops: the kernel set.
        device: its device, where scores come from and weights go.
        experts: the weights.
    """

    def __init__(self, ops: Ops, device: Device, experts: Experts) -> None:
        self._ops = ops
        self._device = device
        self._experts = experts

    def run(self, x: Array, norm: Norm | None, router_input: Array | None = None) -> Array:
        """Run the experts one by one."""
        ops, experts, bias = self._ops, self._experts, self._experts.selection_bias
        x = ops.normed(x, norm)
        scores = self._device.to_host(ops.linear(x if router_input is None else router_input, experts.router))  # [T, X]
        mixed = self._routed(x, route(scores, experts.spec, None if bias is None else self._device.to_host(bias)))
        if experts.shared is None:
            return mixed
        shared = ops.feed_forward(x, experts.shared, experts.activation)
        if experts.shared_gate is not None:
            shared = shared * ops.sigmoid(ops.linear(x, experts.shared_gate))  # [T, 1]
        return mixed + shared

    def _routed(self, x: Array, routes: Routes) -> Array:
        ops, experts, n_used = self._ops, self._experts, routes.experts.shape[1]
        flat = routes.experts.reshape(-1)
        order = np.argsort(flat, kind="stable")  # (token, choice) pairs, grouped by expert
        grouped = ops.rows(x, order // n_used)
        if experts.spec.scales_input:
            grouped = grouped * self._device.on_device_of(grouped, routes.weights.reshape(-1)[order, None])
        bounds = np.flatnonzero(np.diff(flat[order], prepend=-1, append=-1))
        parts = [
            ops.feed_forward(
                ops.rows(grouped, slice(int(start), int(stop))),
                experts.experts[int(flat[order[start]])],
                experts.activation,
            )
            for start, stop in pairwise(bounds)
        ]
        return self._weighted(ops.concatenated(parts), routes, order)

    def _weighted(self, outputs: Array, routes: Routes, order: NDArray[np.intp]) -> Array:
        """The weighted sum of each token's experts; rows of ``outputs`` [T * n_used, E] are sorted by ``order``."""
        ops, n_used = self._ops, routes.experts.shape[1]
        inverse, total = np.empty_like(order), None
        inverse[order] = np.arange(len(order))
        for choice in range(n_used):
            part = ops.rows(outputs, inverse[choice::n_used])
            if not self._experts.spec.scales_input:
                part = part * self._device.on_device_of(part, routes.weights[:, choice : choice + 1])
            total = part if total is None else total + part
        return total


def _shares(scores: FloatArray, gating: Gating) -> FloatArray:
    if gating is Gating.SOFTMAX:
        return _softmax(scores)
    if gating is Gating.SIGMOID:
        with np.errstate(over="ignore"):
            shares: FloatArray = np.reciprocal(1 + np.exp(-scores))
        return shares
    return scores


def _mixed_sparsely(scores: FloatArray, chosen: NDArray[np.intp]) -> FloatArray:
    """The weights [T, n_used] of ``Gating.SPARSE_MIXER``, for ``chosen`` experts in descending order of scores."""
    left, weights = scores.copy(), np.empty(chosen.shape, np.float32)
    for rank in range(chosen.shape[1]):
        expert = chosen[:, rank : rank + 1]
        best = np.take_along_axis(scores, expert, axis=1)
        near = best - scores <= _NEAR * np.maximum(np.abs(scores), best)
        weights[:, rank] = 1 / np.where(near, np.exp(left - best), 0).sum(axis=1)
        np.put_along_axis(left, expert, -np.inf, axis=1)
    return weights


def _softmax(scores: FloatArray) -> FloatArray:
    shares: FloatArray = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return shares
