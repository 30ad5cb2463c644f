"""Whole blocks of the cpu tier, one after another in one call into C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import AnyActivation, NormKind, RopeStyle, Xielu
from slm_native.kernels.cpu_by_head import CpuByHead
from slm_native.kernels.cpu_pages import CpuKvLayer, CpuPlan
from slm_native.kernels.cpu_weights import extension, native_linears
from slm_native.kernels.parameters import LatentAttention, Norm, PlainBlock, Rotation
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
            [_cache_layer(cache) for cache in caches],
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


def native_layer(block: PlainBlock) -> _native.Layer | None:
    """A block in C++; None where there are no kernels for one of its matrices."""
    laurel = (None, None, None) if block.laurel is None else (block.laurel.left, block.laurel.right, block.laurel.norm)
    linears = native_linears(block.q, block.k, block.v, block.output, block.gate, block.up, block.down, *laurel[:2])
    latent = None if block.latent is None else native_latent(block.latent)
    if linears is None or (latent is None and block.latent is not None):
        return None
    behind = block.attn_post_norm, block.ffn_norm, block.ffn_post_norm, laurel[2]
    norms = block.attn_norm, block.q_norm, block.k_norm, block.v_norm, *behind
    scoring = block.scoring
    made: _native.Layer = extension().Layer(
        linears,
        [optional_norm(norm) for norm in norms],
        native_activation(block.activation),
        *(block.head_dim, block.scale),
        *(scoring.softcap or 0.0, scoring.window or 0, scoring.slopes, scoring.sinks),
        *(block.qkv_limit or 0.0, block.residual_scale, block.parallel, block.gate_threshold),
        latent,
    )
    return made


def native_latent(latent: LatentAttention) -> _native.Latent | None:
    """Attention to latents in C++; None where there are no kernels for one of its matrices."""
    linears = native_linears(latent.q_down, latent.q, latent.kv_down)
    if linears is None or not isinstance(latent.k_up, CpuByHead) or not isinstance(latent.v_up, CpuByHead):
        return None
    q_down, q, kv_down = linears
    norms = optional_norm(latent.q_norm), optional_norm(latent.kv_norm)
    made: _native.Latent = extension().Latent(
        *(q_down, norms[0], q, kv_down, norms[1]), latent.k_up.weights, latent.v_up.weights
    )
    return made


def _cache_layer(cache: KvLayer) -> _native.CacheLayer:
    assert isinstance(cache, CpuKvLayer), "pages that another kernel set made"
    return cache.native
