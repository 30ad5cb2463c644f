"""Whole blocks of the cpu tier, one after another in one call into C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import AnyActivation, NormKind, RopeStyle, Xielu
from slm_native.kernels.cpu_pages import CpuKvLayer, CpuPlan
from slm_native.kernels.cpu_weights import extension
from slm_native.kernels.parameters import Norm, PlainBlock, Rotation
from slm_native.kernels.primitives import FusedBlocks
from slm_native.kv import Array, BatchPlan, KvLayer

if TYPE_CHECKING:
    from slm_native import _native


class CpuBlocks(FusedBlocks):
    """Blocks in C++.

    Args:
        kernels: what computes.
        layers: the blocks.
    """

    def __init__(self, kernels: _native.Kernels, layers: Sequence[_native.Layer]) -> None:
        self._kernels = kernels
        self._new_angles = extension().Angles.of
        self._layers = list(layers)

    def run(
        self,
        x: Array,
        rotations: Sequence[Rotation | None],
        plan: BatchPlan,
        caches: Sequence[KvLayer],
        wanted: NDArray[np.bool_] | None = None,
    ) -> Array:
        """Without the GIL from the first block to the last."""
        assert isinstance(plan, CpuPlan), "a plan that another kernel set placed"
        different = {id(rotation): rotation for rotation in rotations}
        made = {key: self._angles(rotation, len(x)) for key, rotation in different.items()}
        angles = [made[id(rotation)] for rotation in rotations]
        pages, rows = (
            [_native_layer(cache) for cache in caches],
            None if wanted is None else np.flatnonzero(wanted).tolist(),
        )
        x = np.ascontiguousarray(x)
        y: Array = self._kernels.run_layers(x, self._layers, pages, angles, plan.pages, plan.slots, plan.native, rows)
        return y

    def _angles(self, rotation: Rotation | None, n_tokens: int) -> _native.Angles:
        none = np.empty((n_tokens, 0), np.float32)
        cos, sin = (none, none) if rotation is None else (rotation.cos, rotation.sin)
        interleaved = rotation is not None and rotation.style is RopeStyle.INTERLEAVED
        angles: _native.Angles = self._new_angles(cos, sin, interleaved)
        return angles


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


def layer_of(block: PlainBlock, linears: Sequence[_native.Linear | None]) -> _native.Layer:
    """A block in C++; ``linears`` are its q, k, v, output, gate, up, down, left and right, None for one it has not."""
    rows = (
        block.attn_post_norm,
        block.ffn_norm,
        block.ffn_post_norm,
        None if block.laurel is None else block.laurel.norm,
    )
    norms = (block.attn_norm, block.q_norm, block.k_norm, block.v_norm, *rows)
    scoring = block.scoring
    made: _native.Layer = extension().Layer(
        linears,
        [optional_norm(norm) for norm in norms],
        native_activation(block.activation),
        *(block.head_dim, block.scale),
        *(scoring.softcap or 0.0, scoring.window or 0, scoring.slopes, scoring.sinks),
        *(block.qkv_limit or 0.0, block.residual_scale, block.parallel, block.gate_threshold),
    )
    return made


def _native_layer(cache: KvLayer) -> _native.CacheLayer:
    assert isinstance(cache, CpuKvLayer), "pages that another kernel set made"
    return cache.native
