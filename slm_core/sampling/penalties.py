"""Steps that penalize tokens of the history."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from slm_core.sampling.candidates import Candidates, Ids, Values, find, remove
from slm_core.sampling.state import StepState

_LARGEST_EXPONENT = math.log(float(np.finfo(np.float32).max))


def penalties(
    ids: Ids,
    logits: Values,
    state: StepState,
    *,
    repeat: float,
    frequency: float,
    presence: float,
    window: int | None,
) -> Candidates:
    """Apply the repeat penalty, then subtract ``count * frequency + presence``, for each token of the window."""
    tokens, counts = np.unique(state.recent(window), return_counts=True)
    indices, is_candidate = find(ids, tokens, state.n_vocab)
    changed, penalized = logits.copy(), logits[indices].astype(np.float64)
    penalized = np.where(penalized > 0, penalized / repeat, penalized * repeat)
    changed[indices] = penalized - counts[is_candidate] * frequency - presence
    return ids, changed


def dry(
    ids: Ids,
    logits: Values,
    state: StepState,
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    window: int | None,
    is_breaker: NDArray[np.bool_],
) -> Candidates:
    """Subtract ``multiplier * base ** (length - allowed_length)`` from tokens that would prolong a repetition.

    ``length`` is the length of the longest suffix of the history that occurred before, followed by the token. No suffix
    crosses a breaker, and no breaker is penalized. The exponent is bounded to keep the power within float32, as in
    llama.cpp. ``is_breaker`` is indexed by token id; its last entry is for all larger ids, and is False.
    """
    history = state.recent(window)
    exponent = _LARGEST_EXPONENT / math.log(base) if base > 1.000001 else 0.0
    breaks = np.flatnonzero(is_breaker[np.minimum(history, len(is_breaker) - 1)])
    since = len(history) if not len(breaks) else len(history) - 1 - int(breaks[-1])
    followers, lengths = repeated_ends(history, min(since, allowed_length + int(exponent)))
    long = (lengths >= allowed_length) & ~is_breaker[np.minimum(followers, len(is_breaker) - 1)]
    tokens, inverse = np.unique(followers[long], return_inverse=True)
    longest = np.zeros(len(tokens))
    np.maximum.at(longest, inverse, lengths[long])
    indices, is_candidate = find(ids, tokens, state.n_vocab)
    if not len(indices):
        return ids, logits
    changed = logits.copy()
    changed[indices] -= multiplier * base ** (longest[is_candidate] - allowed_length)
    return ids, changed


def no_repeat_ngram(ids: Ids, logits: Values, state: StepState, *, size: int) -> Candidates:
    """Remove every token that would complete an n-gram of ``size`` tokens that occurred before."""
    history = state.history
    if size == 1:
        banned = history
    else:
        followers, lengths = repeated_ends(history, size - 1)
        banned = followers[lengths >= size - 1]
    indices, _ = find(ids, np.unique(banned), state.n_vocab)
    return remove(ids, logits, indices) if len(indices) else (ids, logits)


def repeated_ends(history: NDArray[np.int32], longest: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Earlier occurrences of suffixes of the history: the token after each, and its length, at most ``longest``."""
    n = len(history)
    if n < 2 or longest < 1:
        return history[:0], np.empty(0, np.int64)
    ends = np.flatnonzero(history[:-1] == history[-1])
    lengths = np.zeros(n, np.int64)
    active, length = ends, 0
    while len(active):
        length += 1
        lengths[active] = length
        if length == longest:
            break
        active = active[active >= length]
        active = active[history[active - length] == history[n - 1 - length]]
    return history[ends + 1], lengths[ends]
