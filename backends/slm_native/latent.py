"""Multi-head latent attention with its up-projections absorbed: all query heads attend to one latent of each token.

Shapes: T tokens, H query heads, R rotated values, N values that are not, C width of the latent, U of a head's result.
"""

from __future__ import annotations

from collections.abc import Sequence

from slm_core.architectures import LatentSpec
from slm_native.kernels import KernelSet, Linear, Norm
from slm_native.kv import Array
from slm_native.weights import LatentAttention


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
    x = kernels.normed(x, norm)
    down = x if weights.q_down is None else kernels.normed(kernels.linear(x, weights.q_down), weights.q_norm)
    q = kernels.linear(down, weights.q).reshape(len(x), len(weights.k_up), -1)  # [T, H, N+R]
    absorbed = _by_head(kernels, q[:, :, : spec.n_nope], weights.k_up)  # [T, H, C]
    queries = kernels.concatenated([q[:, :, spec.n_nope :], absorbed], axis=2)
    kv = kernels.linear(x, weights.kv_down)  # [T, C+R]
    latent = kernels.normed(kv[:, : spec.n_rank] * 1, weights.kv_norm)
    return queries.reshape(len(x), -1), kernels.concatenated([kv[:, spec.n_rank :], latent], axis=1)


def latent_results(kernels: KernelSet, weights: LatentAttention, spec: LatentSpec, mixed: Array) -> Array:
    """What each head makes of the latents [T, H, R+C] that it mixed: [T, H, U]."""
    return _by_head(kernels, mixed[:, :, mixed.shape[2] - spec.n_rank :], weights.v_up)


def _by_head(kernels: KernelSet, x: Array, weights: Sequence[Linear]) -> Array:
    """Each head's rows [T, width] through its own matrix."""
    made = [kernels.linear(x[:, head] * 1, weight) for head, weight in enumerate(weights)]
    return kernels.concatenated(made, axis=1).reshape(len(x), len(weights), -1)
