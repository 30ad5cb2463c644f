"""Whole blocks of the cpu tier, one after another in one call into C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from slm_core.architectures import Activation, NormKind, RopeStyle
from slm_native import _extension
from slm_native.kernels.cpu_pages import CpuKvLayer, CpuPlan
from slm_native.kernels.kernelset import FusedBlocks
from slm_native.kernels.parameters import Linear, Norm, PlainBlock, Rotation
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
        self._new_angles = _extension.load().Angles.of
        self._layers = list(layers)

    def run(self, x: Array, rotations: Sequence[Rotation | None], plan: BatchPlan, caches: Sequence[KvLayer]) -> Array:
        """Without the GIL from the first block to the last."""
        assert isinstance(plan, CpuPlan), "a plan that another kernel set placed"
        different = {id(rotation): rotation for rotation in rotations}
        made = {key: self._angles(rotation, len(x)) for key, rotation in different.items()}
        angles, n = [made[id(rotation)] for rotation in rotations], len(rotations)
        pages = [_native_layer(cache) for cache in caches[:n]]
        x = np.ascontiguousarray(x)
        y: Array = self._kernels.run_layers(x, self._layers[:n], pages, angles, plan.pages, plan.slots, plan.native)
        return y

    def _angles(self, rotation: Rotation | None, n_tokens: int) -> _native.Angles:
        none = np.empty((n_tokens, 0), np.float32)
        cos, sin = (none, none) if rotation is None else (rotation.cos, rotation.sin)
        interleaved = rotation is not None and rotation.style is RopeStyle.INTERLEAVED
        angles: _native.Angles = self._new_angles(cos, sin, interleaved)
        return angles


def fuses(norm: Norm | None, width: int | None = None) -> bool:
    """Whether C++ has this norm, over rows of ``width`` where that is given."""
    if norm is None:
        return True
    is_plain = norm.kind is NormKind.RMS and norm.bias is None and norm.weight.ndim == 1
    return is_plain and width in (None, len(norm.weight))


def layer_of(block: PlainBlock, packed: Sequence[_native.Weights | None]) -> _native.Layer | None:
    """A block in C++, None where it is none of those that C++ has.

    Args:
        block: the block.
        packed: its matrices q, k, v, output, gate, up, down; None for one that is not in C++.
    """
    q, k, v, output, gate, up, down = packed
    if q is None or k is None or v is None or output is None or gate is None or up is None or down is None:
        return None
    if block.activation is not Activation.SILU or block.up.bias is not None or _bias(block.gate) is not None:
        return None
    heads, rows = (block.q_norm, block.k_norm), (block.attn_norm, block.ffn_norm)
    if not all(fuses(norm, block.head_dim) for norm in heads) or not all(fuses(norm) for norm in rows):
        return None
    epsilons = {norm.eps for norm in (*heads, *rows) if norm is not None}
    if len(epsilons) > 1:
        return None
    scoring = block.scoring
    made: _native.Layer = _extension.load().Layer(
        *(q, block.q.bias, k, block.k.bias, v, block.v.bias),
        *(output, block.output.bias, gate, up, down, block.down.bias),
        *(_weight(norm) for norm in (*rows, *heads)),
        *(max(epsilons, default=0.0), block.head_dim, block.scale),
        *(scoring.softcap or 0.0, scoring.window or 0, scoring.slopes, scoring.sinks),
    )
    return made


def _native_layer(cache: KvLayer) -> _native.CacheLayer:
    assert isinstance(cache, CpuKvLayer), "pages that another kernel set made"
    return cache.native


def _weight(norm: Norm | None) -> Array | None:
    return None if norm is None else norm.weight


def _bias(linear: Linear | None) -> Array | None:
    return None if linear is None else linear.bias
