"""Attention of an encoder: each token to all of its sequence, and nothing is kept.

Shapes: T tokens of the batch, E embedding width, H query heads, K key and value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slm_native.kernels import KernelSet, Norm, Rotation, Scoring
from slm_native.kv import Array, Run
from slm_native.weights import Attention


def attended_both_ways(
    kernels: KernelSet,
    weights: Attention,
    x: Array,
    norm: Norm | None,
    rotation: Rotation | None,
    width: int,
    runs: Sequence[Run],
    scale: float,
    scoring: Scoring,
) -> Array:
    """What a layer's heads make of a batch of whole sequences, [T, H, D].

    Args:
        kernels: the arithmetic.
        weights: of the layer.
        x: what enters the block [T, E].
        norm: the norm before the layer.
        rotation: of queries and keys; None where they stay.
        width: of a head, D.
        runs: the sequences.
        scale: factor on ``q · k``.
        scoring: what else is done with scores.
    """
    assert weights.k is not None and weights.v is not None, "no encoder's layers share keys"
    flat_q, flat_k, flat_v = kernels.project(x, norm, (weights.q, weights.k, weights.v))
    q = kernels.heads(flat_q, width, weights.q_norm, rotation)
    k, v = kernels.heads(flat_k, width, weights.k_norm, rotation), kernels.heads(flat_v, width)
    parts = [
        kernels.attention_both_ways(
            kernels.rows(q, run.rows), kernels.rows(k, run.rows), kernels.rows(v, run.rows), scale, scoring
        )
        for run in runs
    ]
    if len(parts) == 1:
        return parts[0]
    every = np.arange(len(x))
    order = np.concatenate([every[run.rows] for run in runs])
    return kernels.rows(kernels.concatenated(parts), np.argsort(order))
