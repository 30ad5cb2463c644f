"""Layers with a state in the cpu tier: each in one call between its first and its last product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slm_core.architectures import NormKind
from slm_native.kernels.cpu_rwkv import CpuRwkv, native_channel_mix, native_rwkv_block, native_time_mix
from slm_native.kernels.cpu_weights import extension, handle_of, plain_handles
from slm_native.kernels.parameters import Norm
from slm_native.kernels.recurrent import Mamba, Mamba2
from slm_native.kernels.reference import ReferenceKernels
from slm_native.kernels.rwkv import ChannelMix, FusedRwkv, Rwkv7, RwkvBlock
from slm_native.kv import Array

if TYPE_CHECKING:
    from slm_native import _native


class CpuStateKernels(ReferenceKernels):
    """The reference kernels, with layers that have a state in C++.

    Args:
        isa: an instruction set that there is.
        n_threads: threads that compute.
        expanded_bytes: see ``ReferenceKernels``.
    """

    def __init__(self, isa: str, n_threads: int, expanded_bytes: int) -> None:
        super().__init__(expanded_bytes)
        self._states: _native.StateKernels = extension().StateKernels(isa, n_threads)

    def selective_scan(self, x: Array, steps: Array, a: Array, b: Array, c: Array, state: Array) -> tuple[Array, Array]:
        """In one call, heads shared among threads."""
        return self._states.selective_scan(*_contiguous(x, steps, a, b, c, state))

    def gated_convolution(self, projected: Array, window: Array, taps: Array) -> tuple[Array, Array]:
        """In one call."""
        return self._states.gated_convolution(*_contiguous(projected, window, taps))

    def mamba(self, weights: Mamba, projected: Array, window: Array, state: Array) -> tuple[Array, Array, Array]:
        """In one call, where both matrices within have kernels."""
        select, steps, norms = plain_handles(weights.select), handle_of(weights.steps), weights.norms
        if select is None or steps is None or not all(map(_is_plain, norms)):
            return super().mamba(weights, projected, window, state)
        projected, window, state = _contiguous(projected, window, state)
        step_norm, b_norm, c_norm = (None if norm is None else norm.weight for norm in norms)
        return self._states.mamba(
            *(projected, window, state, weights.taps, weights.conv_bias, select[0]),
            *(step_norm, b_norm, c_norm, [_eps(norm) for norm in norms]),
            *(steps, weights.steps.bias, weights.a, weights.d),
        )

    def mamba2(self, weights: Mamba2, projected: Array, window: Array, state: Array) -> tuple[Array, Array, Array]:
        """In one call."""
        norm = weights.norm
        if not _is_plain(norm):
            return super().mamba2(weights, projected, window, state)
        projected, window, state = _contiguous(projected, window, state)
        return self._states.mamba2(
            *(projected, window, state, weights.taps, weights.conv_bias),
            *(weights.step_bias, weights.a, weights.d),
            *(None if norm is None else norm.weight, _eps(norm), weights.spec.n_groups),
        )

    def time_mix(
        self, weights: Rwkv7, x: Array, last: Array, state: Array, first_value: Array | None
    ) -> tuple[Array, Array, Array]:
        """In one call, where all matrices have kernels."""
        native = native_time_mix(weights)
        if native is None:
            return super().time_mix(weights, x, last, state, first_value)
        x, last, state = _contiguous(x, last, state)
        return self._states.time_mix(x, last, state, first_value, native)

    def channel_mix(self, weights: ChannelMix, x: Array, last: Array) -> Array:
        """In one call, where both matrices have kernels."""
        native = native_channel_mix(weights)
        if native is None:
            return super().channel_mix(weights, x, last)
        x, last = _contiguous(x, last)
        y: Array = self._states.channel_mix(x, last, native)
        return y

    def fuse_rwkv(self, blocks: Sequence[RwkvBlock]) -> FusedRwkv | None:
        """In one call, where all matrices have kernels."""
        made = [native for block in blocks if (native := native_rwkv_block(block)) is not None]
        return CpuRwkv(self._states, made) if len(made) == len(blocks) else None


def _contiguous(*arrays: Array) -> Sequence[Any]:
    return [np.ascontiguousarray(array) for array in arrays]


def _is_plain(norm: Norm | None) -> bool:
    return norm is None or (norm.kind is NormKind.RMS and norm.bias is None)


def _eps(norm: Norm | None) -> float:
    return 0.0 if norm is None else norm.eps
