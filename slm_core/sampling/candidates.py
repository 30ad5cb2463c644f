"""The candidates of sampling steps: the remaining tokens and their logits.

Candidates are two arrays: ``ids`` int64 [n], ascending, and ``logits`` float [n], all finite. A step returns new arrays
and never writes into its arguments. Selections are by value with ties broken by id, so that they are the same on every
machine. No selection sorts the vocabulary.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64]
Values: TypeAlias = NDArray[np.floating]
Places: TypeAlias = NDArray[np.intp]
Candidates: TypeAlias = tuple[Ids, Values]

_FEW = 4096
"""The largest number of candidates with float64 logits; for more candidates, float32 takes a tenth of the time."""

_COARSE = 8
"""The least number of coarse groups per k in ``shortlist``: about 7 % more values than necessary reach its bound."""

_MOST_PIECES = 64
"""Up to this number of removed candidates, concatenating the ranges between them is three times as fast as a mask."""


def take(ids: Ids, logits: Values, chosen: Places | NDArray[np.bool_]) -> Candidates:
    """The candidates at ``chosen``: a mask, or ascending indices."""
    if chosen.dtype == np.bool_ and len(chosen) > _FEW:
        chosen = chosen.nonzero()[0]  # two selections by indices take a third of the time of two by a mask
    selected: Values = logits[chosen]
    return ids[chosen], selected.astype(np.float64, copy=False) if len(selected) <= _FEW else selected


def keep(ids: Ids, logits: Values, mask: NDArray[np.bool_], min_keep: int) -> Candidates:
    """The candidates under ``mask``, which contains the likeliest; at least ``min_keep`` candidates."""
    n = np.count_nonzero(mask)
    if n == len(ids):
        return ids, logits
    return take(ids, logits, largest(logits, min_keep) if n < min_keep else mask)


def remove(ids: Ids, logits: Values, places: Places) -> Candidates:
    """All candidates except the indices ``places``, ascending."""
    if len(places) > _MOST_PIECES:
        return np.delete(ids, places), np.delete(logits, places)
    edges = [-1, *places.tolist(), len(ids)]
    pieces = [slice(before + 1, after) for before, after in pairwise(edges)]
    return np.concatenate([ids[piece] for piece in pieces]), np.concatenate([logits[piece] for piece in pieces])


def find(ids: Ids, tokens: NDArray[np.integer], n_vocab: int) -> tuple[Places, NDArray[np.bool_]]:
    """The indices of tokens among the candidates, and a mask of the tokens that are candidates."""
    if len(ids) == n_vocab:
        is_candidate = tokens < n_vocab
        return tokens[is_candidate].astype(np.intp), is_candidate
    indices = np.searchsorted(ids, tokens)
    is_candidate = indices < len(ids)
    is_candidate[is_candidate] = ids[indices[is_candidate]] == tokens[is_candidate]
    return indices[is_candidate], is_candidate


def best_of(logits: Values) -> np.floating:
    """The largest logit; nan if any logit is nan. For few candidates it takes a third of the time of ``max()``."""
    best: np.floating = logits[logits.argmax()]
    return best


def softmax(logits: Values) -> Values:
    """Probabilities [n]."""
    weights: Values = logits - best_of(logits)
    np.exp(weights, out=weights)
    weights /= np.add.reduce(weights)
    return weights


def entropy(logits: Values) -> float:
    """Entropy in nats."""
    shifted = logits - best_of(logits)
    weights = np.exp(shifted)
    total = float(weights.sum())
    return math.log(total) - float(np.dot(weights, shifted)) / total


def largest(values: Values, k: int) -> Places:
    """Indices of the k largest values, ascending; ties: the first."""
    if k >= len(values):
        return np.arange(len(values))
    shortlisted = shortlist(values, k)
    among = values if shortlisted is None else shortlisted[1]
    edge = _kth_largest(among, k)
    chosen = among >= edge
    surplus = np.count_nonzero(chosen) - k
    if surplus:
        tied = (among == edge).nonzero()[0]
        chosen[tied[len(tied) - surplus :]] = False
    indices = chosen.nonzero()[0]
    return indices if shortlisted is None else shortlisted[0][indices]


def fewest(keys: Values, weights: Values, mass: float, at_least: int) -> Places:
    """Indices, ascending, of the fewest largest ``keys`` whose ``weights`` together reach ``mass``."""
    n_tried = max(64, 2 * at_least)
    if len(keys) <= n_tried:
        ranked = (-keys).argsort(kind="stable")
        indices = ranked[: n_to_reach(weights[ranked], mass, at_least)]
        indices.sort()
        return indices
    while n_tried < len(keys):
        indices = largest(keys, n_tried)
        among = keys[indices]
        n = n_to_reach(weights[indices][(-among).argsort()], mass, at_least)
        if n <= n_tried:
            return indices[largest(among, n)]
        n_tried *= 8
    return largest(keys, n_to_reach(weights[(-keys).argsort()], mass, at_least))


def n_to_reach(ranked: Values, mass: float, at_least: int) -> int:
    """The number of first weights whose sum reaches ``mass``; if no sum reaches it, one more than their number."""
    return max(at_least, 1 + int(np.add.accumulate(ranked, dtype=np.float64).searchsorted(mass)))


def _kth_largest(values: Values, k: int) -> float:
    partitioned = values.copy()
    partitioned.partition(len(partitioned) - k)
    return float(partitioned[len(partitioned) - k])


def _bound(maxima: Values, k: int) -> float:
    """A lower bound of the k-th largest of the maxima: the k-th largest maximum of coarser groups.

    Partitioning fewer values takes a fifth of the time. If this bound is -inf, the result is the k-th largest itself.
    """
    n_rows = len(maxima) // (_COARSE * k)
    if n_rows < 2:
        return _kth_largest(maxima, k)
    n_groups = len(maxima) // n_rows
    bound = _kth_largest(np.maximum.reduce(maxima[: n_rows * n_groups].reshape(n_rows, n_groups), axis=0), k)
    return _kth_largest(maxima, k) if bound == -math.inf else bound


def shortlist(values: Values, k: int) -> Candidates | None:
    """Indices, ascending, and values of a subset with the k largest; None if the whole row must be searched.

    The k-th largest maximum of disjoint groups is a lower bound: at least k values reach it, and only groups whose
    maximum reaches it contain any of them. One pass computes the maxima; after it, few values are read, while a
    partition moves all of them. The result is also None if the bound is -inf, or the largest value is not finite.

    Selecting from the result equals selecting from all values: it does not depend on the bound.
    """
    n_rows = 1 << math.isqrt(len(values) // (4 * k)).bit_length()  # a power of two, which divides most vocabulary sizes
    n_groups = len(values) // n_rows  # about the number of values read after the pass
    if n_groups < 4 * k:
        return None
    grouped, remainder = values[: n_rows * n_groups].reshape(n_rows, n_groups), values[n_rows * n_groups :]
    maxima: Values = np.maximum.reduce(grouped, axis=0)  # a column is a group
    if len(remainder):
        np.maximum(maxima[: len(remainder)], remainder, out=maxima[: len(remainder)])
    bound = _bound(maxima, k)
    if bound == -math.inf or not math.isfinite(best_of(maxima)):
        return None
    groups = (maxima >= bound).nonzero()[0]
    pool = grouped.take(groups, axis=1).ravel()
    pooled = (pool >= bound).nonzero()[0]
    row, group = np.divmod(pooled, len(groups))
    indices, selected = row * n_groups + groups[group], pool[pooled]
    late = (remainder >= bound).nonzero()[0] if len(remainder) else remainder
    if len(late):
        return np.concatenate([indices, n_rows * n_groups + late]), np.concatenate([selected, remainder[late]])
    return indices, selected
