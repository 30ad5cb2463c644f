"""Multi-head latent attention with its up-projections absorbed: all query heads attend to one latent of each token.

Shapes: T tokens, H query heads, R rotated values, N values that are not, C width of the latent, U of a head's result.
"""

from __future__ import annotations

from slm_core.architectures import LatentSpec
from slm_native.kernels import KernelSet, LatentAttention, Norm
from slm_native.kv import Array


def latent_queries_and_keys(
    kernels: KernelSet, weights: LatentAttention, spec: LatentSpec, x: Array, norm: Norm | None
) -> tuple[Array, Array]:
    """Queries [T, H*(R+C)] and the key [T, R+C] that all heads share, before they are rotated.

    Args:
        kernels: the arithmetic.
        weights: of the layer.
        spec: its widths.
        x: what enters the block, [T, E].
        norm: the norm before the layer.
    """
    q, kv = kernels.project(x, norm, (weights.q_down or weights.q, weights.kv_down))  # kv: [T, C+R]
    if weights.q_down is not None:
        (q,) = kernels.project(q, weights.q_norm, (weights.q,))
    q = q.reshape(len(x), weights.k_up.n_heads, -1)  # [T, H, N+R]
    absorbed = weights.k_up.run(q[:, :, : spec.n_nope])  # [T, H, C]
    queries = kernels.concatenated([q[:, :, spec.n_nope :], absorbed], axis=2)
    latent = kernels.normed(kv[:, : spec.n_rank] * 1, weights.kv_norm)
    return queries.reshape(len(x), -1), kernels.concatenated([kv[:, spec.n_rank :], latent], axis=1)


def latent_results(weights: LatentAttention, spec: LatentSpec, mixed: Array) -> Array:
    """What each head makes of the latents [T, H, R+C] that it mixed: [T, H, U]."""
    return weights.v_up.run(mixed[:, :, mixed.shape[2] - spec.n_rank :])
