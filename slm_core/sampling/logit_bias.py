"""Steps that bias or ban given tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from slm_core.sampling.candidates import Candidates, Ids, Values, find, remove
from slm_core.sampling.state import StepState


def logit_bias(
    ids: Ids, logits: Values, state: StepState, *, tokens: NDArray[np.int64], biases: NDArray[np.float64]
) -> Candidates:
    """Add ``biases`` to the logits of ``tokens``; one of -inf takes the token out."""
    places, known = find(ids, tokens, state.n_vocab)
    is_ban = np.isneginf(biases[known])
    if not is_ban.all():
        logits = logits.copy()
        logits[places[~is_ban]] += biases[known][~is_ban]
    return remove(ids, logits, places[is_ban]) if is_ban.any() else (ids, logits)


def end_of_answer(
    ids: Ids, logits: Values, state: StepState, *, eog_ids: NDArray[np.int64], bias: float, min_tokens: int
) -> Candidates:
    """Bias the tokens that end an answer; take them out before ``min_tokens``, unless nothing else is left."""
    places, _ = find(ids, eog_ids, state.n_vocab)
    if state.n_said < min_tokens or bias == -math.inf:
        return remove(ids, logits, places) if len(places) < len(ids) else (ids, logits)
    changed = logits.copy()
    changed[places] += bias
    return ids, changed
