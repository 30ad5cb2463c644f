"""Making control vectors: the difference between the hidden states of positive and negative texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from slm_core.embedding import layer_states
from slm_core.errors import InvalidOption
from slm_core.protocols import Context

SteeringMethod = Literal["mean", "pca"]
"""How differences of pairs become a direction: their mean, or their first principal component around zero."""


def control_vector(
    context: Context,
    positive: Sequence[Sequence[int]],
    negative: Sequence[Sequence[int]],
    layers: Sequence[int],
    method: SteeringMethod = "mean",
    progress: Callable[[float], None] | None = None,
) -> dict[int, NDArray[np.float32]]:
    """The directions from negative to positive texts, from the states of the last token of each.

    The length of a direction is the mean difference of the pairs along it, so a scale of 1 compensates the difference.
    The method follows representation engineering (Zou et al., https://arxiv.org/abs/2310.01405) and repeng.

    Args:
        context: an empty context that declares ``LAYER_STATES``; it is empty afterwards, too.
        positive: the tokens of texts.
        negative: the tokens of the negative texts, one for each positive text, in the same order.
        layers: the layers to steer.
        method: "mean", or "pca" if the texts of a pair also differ in other properties.
        progress: called with the share of texts that are done, 0.0 to 1.0.

    Returns:
        The direction of each layer, float32 [E].

    Raises:
        InvalidOption: no pairs, another number of positive than of negative texts, an unknown method or layer.
        UnsupportedOutput: the context does not declare ``LAYER_STATES``.
        ContextFull: a text is longer than the context.
    """
    if method not in get_args(SteeringMethod):
        raise InvalidOption(f"method={method!r} (accepted: {', '.join(get_args(SteeringMethod))})")
    if not positive or len(positive) != len(negative):
        raise InvalidOption(
            f"{len(positive)} positive texts, but {len(negative)} negative texts (accepted:"
            f" the same number of both, 1 or more)"
        )
    texts, states = [*positive, *negative], []
    for state in layer_states(context, texts, layers, only_last=True):
        states.append(state[:, 0])
        if progress is not None:
            progress(len(states) / len(texts))
    halves = np.array(states, np.float64).reshape(2, len(positive), len(layers), -1)
    differences = (halves[0] - halves[1]).swapaxes(0, 1)  # [layers, n, E]
    direction = _mean if method == "mean" else _principal
    return {layer: direction(each).astype(np.float32) for layer, each in zip(layers, differences, strict=True)}


def _mean(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = differences.mean(axis=0)
    return mean


def _principal(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of the differences [n, E], projected onto their first principal component around zero."""
    component = np.linalg.svd(differences, full_matrices=False)[2][0]
    projected: NDArray[np.float64] = component * (differences.mean(axis=0) @ component)
    return projected
