"""The float64 reference of multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slm_conformance.oracle.reference import Array, Reference
from slm_conformance.oracle.weights import Weights


def predictions(weights: Weights, tokens: Sequence[int], token: int, n: int) -> Array:
    """The logits of the ``n`` tokens after ``tokens`` and ``token``, each after the best token before it, [n, V].

    The MTP layer at position p gets the embedding of token p and the hidden state of token p - 1, which is zero for the
    first token. After ``token``, the layer's normalized output takes the place of the model's hidden state.

    Args:
        weights: a model with an MTP layer.
        tokens: tokens that the model has read; there may be none.
        token: the next token, whose hidden state is unknown.
        n: number of predictions.
    """
    model, layer = Reference(weights), Reference(weights.mtp_layer())
    zero = np.zeros((1, weights.shape.n_embd))
    states = np.concatenate([zero, model.embed(tokens)]) if tokens else zero  # [S + 1, E]
    embedded = model.table([*tokens, token])
    rows = []
    for _ in range(n):
        state = layer.embed_rows(_inputs(weights, embedded, states))[-1:]
        rows.append(layer.logits(state))
        embedded, states = model.table([int(rows[-1].argmax())]), state
    return np.concatenate(rows)


def _inputs(weights: Weights, embedded: Array, states: Array) -> Array:
    """The projection of [embedding, state], both normalized, [T, E]."""
    tensors, prefix = weights.doubles(), f"blk.{weights.shape.n_layers}.nextn."
    eps = weights.shape.norm_eps
    normed = [
        x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * tensors[f"{prefix}{name}.weight"]
        for name, x in (("enorm", embedded), ("hnorm", states))
    ]
    result: Array = np.concatenate(normed, axis=1) @ tensors[f"{prefix}eh_proj.weight"].T
    return result
