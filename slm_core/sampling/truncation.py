"""Truncation: steps that keep some of the candidates."""

from __future__ import annotations

import math

import numpy as np

from slm_core.numerics import log_sum_exp
from slm_core.sampling.candidates import (
    Candidates,
    Ids,
    Values,
    best_of,
    entropy,
    fewest,
    keep,
    largest,
    n_to_reach,
    softmax,
    take,
)
from slm_core.sampling.state import StepState


def top_n_sigma(ids: Ids, logits: Values, state: StepState, *, n: float, min_keep: int) -> Candidates:
    """Keep logits of at least the largest minus ``n`` standard deviations (Tang et al., arXiv 2411.07641)."""
    return keep(ids, logits, logits >= logits.max() - n * float(logits.std()), min_keep)


def top_k(ids: Ids, logits: Values, state: StepState, *, k: int) -> Candidates:
    """Keep the ``k`` likeliest (Fan et al., arXiv 1805.04833)."""
    return (ids, logits) if k >= len(ids) else take(ids, logits, largest(logits, k))


def typical_p(ids: Ids, logits: Values, state: StepState, *, p: float, min_keep: int) -> Candidates:
    """Keep tokens with the smallest ``|-log p - H|`` that together reach ``p`` (Meister et al., arXiv 2202.00666)."""
    surprise = log_sum_exp(logits) - logits
    typicality = -np.abs(surprise - entropy(logits))
    return take(ids, logits, fewest(typicality, np.exp(-surprise), p, min_keep))


def top_p(ids: Ids, logits: Values, state: StepState, *, p: float, min_keep: int) -> Candidates:
    """Keep the likeliest tokens that together reach ``p`` (Holtzman et al., arXiv 1904.09751)."""
    return take(ids, logits, fewest(logits, softmax(logits), p, min_keep))


def min_p(ids: Ids, logits: Values, state: StepState, *, p: float, min_keep: int) -> Candidates:
    """Keep tokens of at least ``p`` times the largest probability (Nguyen et al., arXiv 2407.01082)."""
    return keep(ids, logits, logits >= best_of(logits) + math.log(p), min_keep)


def top_k_top_p_min_p(
    ids: Ids, logits: Values, state: StepState, *, k: int, p: float, min_p: float, min_keep: int
) -> Candidates:
    """``top_k``, then ``top_p`` (if below 1), then ``min_p`` (if above 0), as one step.

    Nearly every chain runs them in this order. For so few candidates the number of NumPy calls determines the time, and
    all three share one ranking.
    """
    if len(ids) > 2 * k:
        ids, logits = take(ids, logits, largest(logits, k))
    logits = logits.astype(np.float64, copy=False)
    negated = -logits
    ranks = negated.argsort(kind="stable")[:k]
    best, n = logits[ranks[0]], len(ranks)
    if p < 1:
        weights = np.exp(logits - best)
        total = np.add.reduce(weights if n == len(ids) else weights[np.sort(ranks)])
        n = min(n, n_to_reach(weights[ranks] / total, p, min_keep))
    if min_p > 0:
        n_likely = int(negated[ranks[:n]].searchsorted(-(best + math.log(min_p)), side="right"))
        n = max(n_likely, min(min_keep, n))
    selected = ranks[:n]
    selected.sort()
    return ids[selected], logits[selected]


def top_a(ids: Ids, logits: Values, state: StepState, *, a: float, min_keep: int) -> Candidates:
    """Keep tokens of at least ``a`` times the square of the largest probability (BlinkDL, RWKV-LM)."""
    bound = math.log(a) + 2 * float(logits.max()) - log_sum_exp(logits)
    return keep(ids, logits, logits >= bound, min_keep)


def epsilon_cutoff(ids: Ids, logits: Values, state: StepState, *, epsilon: float, min_keep: int) -> Candidates:
    """Keep tokens of at least the probability ``epsilon`` (Hewitt et al., arXiv 2210.15191)."""
    return keep(ids, logits, logits >= log_sum_exp(logits) + math.log(epsilon), min_keep)


def eta_cutoff(ids: Ids, logits: Values, state: StepState, *, epsilon: float, min_keep: int) -> Candidates:
    """Keep tokens of at least ``min(epsilon, sqrt(epsilon) * exp(-H))`` (Hewitt et al., arXiv 2210.15191)."""
    bound = min(math.log(epsilon), math.log(epsilon) / 2 - entropy(logits))
    return keep(ids, logits, logits >= log_sum_exp(logits) + bound, min_keep)


def xtc(
    ids: Ids, logits: Values, state: StepState, *, probability: float, threshold: float, min_keep: int
) -> Candidates:
    """With ``probability``, remove all but the least likely of the tokens of at least ``threshold`` (p-e-w, XTC)."""
    if state.uniform() >= probability:
        return ids, logits
    likely = np.flatnonzero(logits >= log_sum_exp(logits) + math.log(threshold))
    if len(likely) < 2 or len(ids) - len(likely) + 1 < min_keep:
        return ids, logits
    is_kept = np.ones(len(ids), bool)
    is_kept[likely] = False
    is_kept[likely[logits[likely].argmin()]] = True
    return take(ids, logits, is_kept)
