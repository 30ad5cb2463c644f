"""Recurrent layers in C++: one call between the first and the last product of a layer, or for whole RWKV-7 blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from slm_core.architectures import NormKind
from slm_native.kernels.cpu.handles import (
    changed_linears,
    extension,
    handle_of,
    native_linear,
    native_linears,
    native_norm,
    optional_norm,
    plain_handles,
)
from slm_native.kernels.parameters import Norm
from slm_native.kernels.recurrent import Mamba, Mamba2, RecurrentWeights, ShortConv
from slm_native.kernels.reference import ReferenceKernels
from slm_native.kernels.rwkv import SLOWEST, ChannelMix, Rwkv7, RwkvBlock
from slm_native.kv import Array

if TYPE_CHECKING:
    from slm_native import _native


class CpuRecurrentKernels(ReferenceKernels):
    """The reference kernels, with recurrent layers in C++.

    Args:
        isa: an available instruction set.
        n_threads: number of threads.
        expanded_bytes: see ``ReferenceKernels``.
    """

    def __init__(self, isa: str, n_threads: int, expanded_bytes: int) -> None:
        super().__init__(expanded_bytes)
        self._states: _native.StateKernels = extension().StateKernels(isa, n_threads)
        self._layers: _Layers = WeakKeyDictionary()

    def selective_scan(self, x: Array, steps: Array, a: Array, b: Array, c: Array, state: Array) -> tuple[Array, Array]:
        """In one call, with heads divided among threads."""
        return self._states.selective_scan(*_contiguous(x, steps, a, b, c, state))

    def gated_convolution(self, projected: Array, window: Array, taps: Array) -> tuple[Array, Array]:
        """In one call."""
        return self._states.gated_convolution(*_contiguous(projected, window, taps))

    def mamba(self, weights: Mamba, projected: Array, window: Array, state: Array) -> tuple[Array, Array, Array]:
        """In one call, if both inner matrices have kernels."""
        native = _native_mamba(weights)
        if native is None:
            return super().mamba(weights, projected, window, state)
        projected, window, state = _contiguous(projected, window, state)
        return self._states.mamba(projected, window, state, native)

    def mamba2(self, weights: Mamba2, projected: Array, window: Array, state: Array) -> tuple[Array, Array, Array]:
        """In one call."""
        native = _native_mamba2(weights)
        if native is None:
            return super().mamba2(weights, projected, window, state)
        projected, window, state = _contiguous(projected, window, state)
        return self._states.mamba2(projected, window, state, native)

    def recurrent_layer(
        self,
        weights: RecurrentWeights,
        x: Array,
        norm: Norm | None,
        residual: Array,
        scale: float,
        before: Sequence[Array],
    ) -> tuple[Array, tuple[Array, ...]]:
        """In one call, if all matrices have kernels."""
        cached = self._layers.get(weights)
        if cached is None or cached[0] is not norm:
            cached = self._layers[weights] = norm, _native_layer(weights, norm)
        if cached[1] is None:
            return super().recurrent_layer(weights, x, norm, residual, scale, before)
        x, residual, *before = _contiguous(x, residual, *before)
        return self._states.run_layer(x, residual, cached[1], len(before[0]), scale, before)

    def time_mix(
        self, weights: Rwkv7, x: Array, last: Array, state: Array, first_value: Array | None
    ) -> tuple[Array, Array, Array]:
        """In one call, if all matrices have kernels."""
        native = native_time_mix(weights)
        if native is None:
            return super().time_mix(weights, x, last, state, first_value)
        x, last, state = _contiguous(x, last, state)
        return self._states.time_mix(x, last, state, first_value, native)

    def channel_mix(self, weights: ChannelMix, x: Array, last: Array) -> Array:
        """In one call, if both matrices have kernels."""
        native = native_channel_mix(weights)
        if native is None:
            return super().channel_mix(weights, x, last)
        x, last = _contiguous(x, last)
        y: Array = self._states.channel_mix(x, last, native)
        return y


_Layers: TypeAlias = "WeakKeyDictionary[RecurrentWeights, tuple[Norm | None, _native.StateLayer | None]]"
"""Recurrent layers in C++, each with its norm; None if one of the matrices has no kernel."""


def _native_layer(weights: RecurrentWeights, norm: Norm | None) -> _native.StateLayer | None:
    linears = native_linears(weights.project, weights.output)
    if isinstance(weights, ShortConv):
        between: _native.Mamba | _native.Mamba2 | Array | None = weights.taps
    else:
        between = _native_mamba(weights) if isinstance(weights, Mamba) else _native_mamba2(weights)
    if linears is None or between is None:
        return None
    native: _native.StateLayer = extension().StateLayer(optional_norm(norm), linears[0], between, linears[1])
    return native


def _native_mamba(weights: Mamba) -> _native.Mamba | None:
    select, steps, norms = plain_handles(weights.select), handle_of(weights.steps), weights.norms
    if select is None or steps is None or not all(map(_is_plain, norms)):
        return None
    rows = [None if norm is None else norm.weight for norm in norms]
    native: _native.Mamba = extension().Mamba(
        *(weights.taps, weights.conv_bias, select[0], *rows, [_eps(norm) for norm in norms]),
        *(steps, weights.steps.bias, weights.a, weights.d),
    )
    return native


def _native_mamba2(weights: Mamba2) -> _native.Mamba2 | None:
    norm, spec = weights.norm, weights.spec
    if not _is_plain(norm):
        return None
    native: _native.Mamba2 = extension().Mamba2(
        *(weights.taps, weights.conv_bias, weights.step_bias, weights.a, weights.d),
        *(None if norm is None else norm.weight, _eps(norm), spec.n_groups, spec.n_state),
    )
    return native


def _contiguous(*arrays: Array) -> Sequence[Any]:
    return [np.ascontiguousarray(array) for array in arrays]


def _is_plain(norm: Norm | None) -> bool:
    return norm is None or (norm.kind is NormKind.RMS and norm.bias is None)


def _eps(norm: Norm | None) -> float:
    return 0.0 if norm is None else norm.eps


def native_rwkv_block(block: RwkvBlock) -> _native.RwkvBlock | None:
    """A block in C++; None if a matrix has no kernel, or a linear has a scale or a bias."""
    time, channel, output = (
        native_time_mix(block.time),
        native_channel_mix(block.channel),
        native_linear(block.time.output),
    )
    if time is None or channel is None or output is None or changed_linears(block.time.output):
        return None
    norms = native_norm(block.time_norm), native_norm(block.channel_norm)
    native: _native.RwkvBlock = extension().RwkvBlock(norms[0], time, output, norms[1], channel)
    return native


def native_time_mix(weights: Rwkv7) -> _native.TimeMix | None:
    """Time mixing up to its output matrix in C++; None if a matrix has no kernel, or a linear has a scale or a bias."""
    w, first = weights, weights.first_value
    pairs = [w.decay, w.rate, w.gate] if first is None else [w.decay, w.rate, w.gate, first]
    low_rank = chain.from_iterable((pair.down, pair.up) for pair in pairs)
    matrices = plain_handles(w.receptance, w.key, w.value, *low_rank)
    if matrices is None:
        return None
    rows = [w.decay.base, w.rate.base, w.key_removed, w.key_rate, w.bonus, w.head_norm.weight, w.head_norm.bias]
    if first is not None:
        rows.append(first.base)
    unit, eps = w.unit_norm.weight, (w.unit_norm.eps, w.head_norm.eps)
    native: _native.TimeMix = extension().TimeMix(
        w.shares, matrices, [row.reshape(-1) for row in rows], unit, *eps, SLOWEST
    )
    return native


def native_channel_mix(weights: ChannelMix) -> _native.ChannelMix | None:
    """Channel mixing in C++; None if a matrix has no kernel, or a linear has a scale or a bias."""
    matrices = plain_handles(weights.up, weights.down)
    if matrices is None:
        return None
    native: _native.ChannelMix = extension().ChannelMix(weights.share, *matrices)
    return native
