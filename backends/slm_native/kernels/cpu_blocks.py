"""Whole blocks of the cpu tier, one after another in one call into C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slm_core.architectures import RopeStyle
from slm_native.kernels.cpu_by_head import CpuByHead
from slm_native.kernels.cpu_mixtures import CpuMixture
from slm_native.kernels.cpu_pages import CpuKvLayer, CpuPlan
from slm_native.kernels.cpu_parameters import native_activation, native_norm, optional_norm
from slm_native.kernels.cpu_weights import extension, native_linears
from slm_native.kernels.parameters import AltUp, LatentAttention, LayerEmbedding, PlainBlock, Rotation
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
        streams: Sequence[Array],
        rotations: Sequence[Rotation | None],
        plan: BatchPlan,
        caches: Sequence[KvLayer],
        own: Sequence[Array | None],
        wanted: NDArray[np.bool_] | None = None,
    ) -> list[Array]:
        """Without the GIL from the first block to the last."""
        assert isinstance(plan, CpuPlan), "a plan that another kernel set placed"
        different = {id(rotation): rotation for rotation in rotations}
        made = {key: self._angles(rotation, len(streams[0])) for key, rotation in different.items()}
        angles = [made[id(rotation)] for rotation in rotations]
        pages, rows = (
            [_cache_layer(cache) for cache in caches],
            None if wanted is None else np.flatnonzero(wanted).tolist(),
        )
        x = [np.ascontiguousarray(stream) for stream in streams]
        where = plan.pages, plan.slots, plan.native
        return list(self._kernels.run_layers(x, self._layers, pages, angles, own, *where, rows))

    def _angles(self, rotation: Rotation | None, n_tokens: int) -> _native.Angles:
        none = np.empty((n_tokens, 0), np.float32)
        cos, sin = (none, none) if rotation is None else (rotation.cos, rotation.sin)
        interleaved = rotation is not None and rotation.style is RopeStyle.INTERLEAVED
        angles: _native.Angles = self._new_angles(cos, sin, interleaved)
        return angles


def native_layer(block: PlainBlock) -> _native.Layer | None:
    """A block in C++; None where there are no kernels for one of its matrices."""
    laurel = (None, None, None) if block.laurel is None else (block.laurel.left, block.laurel.right, block.laurel.norm)
    linears = native_linears(block.q, block.k, block.v, block.output, block.gate, block.up, block.down, *laurel[:2])
    latent = None if block.latent is None else native_latent(block.latent)
    mixture = block.mixture.native if isinstance(block.mixture, CpuMixture) else None
    altup = None if block.altup is None else native_altup(block.altup, block.active_stream)
    embedding = None if block.embedding is None else native_embedding(block.embedding)
    parts = ((block.latent, latent), (block.mixture, mixture), (block.altup, altup), (block.embedding, embedding))
    if linears is None or any(given is not None and made is None for given, made in parts):
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
        *(latent, mixture, altup, embedding, 1.0 if block.output_scale is None else float(block.output_scale[0])),
    )
    return made


def native_altup(altup: AltUp, active: int) -> _native.AltUp | None:
    """Alternating updates in C++, likewise."""
    linears = native_linears(altup.router, altup.predict, altup.correct)
    if linears is None:
        return None
    router, *mixing = linears
    norm = replace(altup.router_norm, weight=altup.router_norm.weight / np.float32(altup.router.weight.n_in))
    made: _native.AltUp = extension().AltUp(router, native_norm(norm), *mixing, altup.scale, active)
    return made


def native_embedding(embedding: LayerEmbedding) -> _native.LayerEmbedding | None:
    """How a block lets its own embedding in, likewise."""
    linears = native_linears(embedding.gate, embedding.project)
    if linears is None:
        return None
    made: _native.LayerEmbedding = extension().LayerEmbedding(*linears, native_norm(embedding.norm))
    return made


def native_latent(latent: LatentAttention) -> _native.Latent | None:
    """Attention to latents in C++, likewise."""
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
