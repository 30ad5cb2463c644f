"""The tokens that a sampler may choose from a row of logits, by the formulas of the options in plain NumPy.

The rows come from the float64 reference. A backend's rows may differ from them within the tolerance of clause 9. So a
token is right if any row within the tolerance gives it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slm_core.sampling import Sampling

_MASK = 2**64 - 1
_ROUNDING = 1e-6
"""The error of sums of probabilities, in float32 or float64."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of a token in an answer.

    Attributes:
        history: the tokens of the prompt and of the answer so far.
        n_said: the number of tokens of the answer so far.
        number: the random number of this draw, in [0, 1).
        eog_ids: the EOG tokens.
    """

    history: Sequence[int]
    n_said: int
    number: float
    eog_ids: Collection[int]


def uniform(seed: int, stream: int, n: int) -> float:
    """Number ``n`` (from 0) in [0, 1) of a stream of a seed: SplitMix64 (Steele, Lea, Flood 2014) of a counter."""
    start = _split_mix(_split_mix(seed) ^ stream)
    return (_split_mix(start + n + 1) >> 11) / 2**53


def may_be_chosen(token: int, row: NDArray[np.floating], error: float, sampling: Sampling, choice: Choice) -> bool:
    """Whether the options choose a token from some row within ``error`` of this row.

    Args:
        token: the chosen token.
        row: the reference's logits, float64 [V].
        error: the largest error of a logit.
        sampling: its logit bias, bans, penalties, ``min_tokens`` and ``temperature`` are used; truncation must be off.
        choice: history and random number.
    """
    logits, slack = changed_logits(row, error, sampling, choice)
    if not np.isfinite(logits[token]):
        return False
    if sampling.temperature == 0:
        return bool(logits[token] >= logits.max() - 2 * slack)
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    edges = np.cumsum(weights / weights.sum())
    # Each weight, and their sum, is off by a factor of exp(slack / temperature) at most.
    edge_error = np.expm1(min(2 * slack / sampling.temperature, 1.0)) + _ROUNDING
    low = edges[token - 1] if token else 0.0
    return bool(low - edge_error <= choice.number <= edges[token] + edge_error)


def changed_logits(
    row: NDArray[np.floating], error: float, sampling: Sampling, choice: Choice
) -> tuple[NDArray[np.float64], float]:
    """The logits after bias, bans and penalties, in the order of the options' table, and their error bound."""
    logits = row.astype(np.float64)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    logits[list(sampling.banned_tokens)] = -np.inf
    ends = sorted(choice.eog_ids)
    logits[ends] = -np.inf if choice.n_said < sampling.min_tokens else logits[ends] + sampling.eog_bias
    window = sampling.penalty_window
    recent = list(choice.history) if window is None else list(choice.history)[-window:]
    for token in set(recent):
        divided = logits[token] > 0
        logits[token] = logits[token] / sampling.repeat_penalty if divided else logits[token] * sampling.repeat_penalty
        logits[token] -= recent.count(token) * sampling.frequency_penalty + sampling.presence_penalty
    return logits, error * max(1.0, sampling.repeat_penalty)


def _split_mix(value: int) -> int:
    z = (value * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
