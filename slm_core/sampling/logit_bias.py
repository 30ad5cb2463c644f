"""Steps that bias or ban tokens by id."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from slm_core.sampling.candidates import Candidates, Ids, Values, find, remove
from slm_core.sampling.state import StepState


def logit_bias(
    ids: Ids, logits: Values, state: StepState, *, tokens: NDArray[np.int64], biases: NDArray[np.float64]
) -> Candidates:
    """Add ``biases`` to the logits of ``tokens``; -inf removes the token."""
    indices, is_candidate = find(ids, tokens, state.n_vocab)
    is_ban = np.isneginf(biases[is_candidate])
    if not is_ban.all():
        logits = logits.copy()
        logits[indices[~is_ban]] += biases[is_candidate][~is_ban]
    return remove(ids, logits, indices[is_ban]) if is_ban.any() else (ids, logits)


def end_of_answer(
    ids: Ids, logits: Values, state: StepState, *, eog_ids: NDArray[np.int64], bias: float, min_tokens: int
) -> Candidates:
    """Bias the EOG tokens; remove them before ``min_tokens``, unless they are the only candidates."""
    indices, _ = find(ids, eog_ids, state.n_vocab)
    if state.n_said < min_tokens or bias == -math.inf:
        return remove(ids, logits, indices) if len(indices) < len(ids) else (ids, logits)
    changed = logits.copy()
    changed[indices] += bias
    return ids, changed
