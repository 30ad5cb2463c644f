"""What every step works on: the tokens that may still come, and their logits.

Candidates are two arrays: ``ids`` int64 [n], ascending, and ``logits`` float [n], all finite. A step returns both anew
and never writes into what it was given. Selections are by value with ties broken by id, so that they are the same on
every machine; none sorts the vocabulary.
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
"""Candidates from which on down logits are kept in float64; above, float32 costs a tenth."""

_MOST_PIECES = 64
"""Places up to which the pieces between them are joined, which takes a third of the time that a mask does."""


def take(ids: Ids, logits: Values, chosen: Places | NDArray[np.bool_]) -> Candidates:
    """Those at ``chosen``: a mask, or places in ascending order."""
    kept: Values = logits[chosen]
    return ids[chosen], kept.astype(np.float64, copy=False) if len(kept) <= _FEW else kept


def keep(ids: Ids, logits: Values, mask: NDArray[np.bool_], min_keep: int) -> Candidates:
    """Those under ``mask``, which holds the likeliest; at least ``min_keep`` of them."""
    n = np.count_nonzero(mask)
    if n == len(ids):
        return ids, logits
    return take(ids, logits, largest(logits, min_keep) if n < min_keep else mask)


def remove(ids: Ids, logits: Values, places: Places) -> Candidates:
    """All candidates except those at ``places``, ascending."""
    if len(places) > _MOST_PIECES:
        return np.delete(ids, places), np.delete(logits, places)
    edges = [-1, *places.tolist(), len(ids)]
    pieces = [slice(before + 1, after) for before, after in pairwise(edges)]
    return np.concatenate([ids[piece] for piece in pieces]), np.concatenate([logits[piece] for piece in pieces])


def find(ids: Ids, tokens: NDArray[np.integer], n_vocab: int) -> tuple[Places, NDArray[np.bool_]]:
    """The indices of tokens among the candidates, and a mask of the tokens that are candidates."""
    if len(ids) == n_vocab:
        known = tokens < n_vocab
        return tokens[known].astype(np.intp), known
    places = np.searchsorted(ids, tokens)
    known = places < len(ids)
    known[known] = ids[places[known]] == tokens[known]
    return places[known], known


def best_of(logits: Values) -> np.floating:
    """The largest; nan if there is one. For few candidates it takes a third of max()'s time."""
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
    """Places of the k largest, ascending; of equal values, the first."""
    if k >= len(values):
        return np.arange(len(values))
    few = shortlist(values, k)
    among = values if few is None else few[1]
    edge = _kth_largest(among, k)
    chosen = among >= edge
    surplus = np.count_nonzero(chosen) - k
    if surplus:
        tied = (among == edge).nonzero()[0]
        chosen[tied[len(tied) - surplus :]] = False
    places = chosen.nonzero()[0]
    return places if few is None else few[0][places]


def fewest(keys: Values, weights: Values, mass: float, at_least: int) -> Places:
    """Places, ascending, of the fewest largest ``keys`` whose ``weights`` together reach ``mass``."""
    n_tried = max(64, 2 * at_least)
    if len(keys) <= n_tried:
        ranked = (-keys).argsort(kind="stable")
        places = ranked[: n_to_reach(weights[ranked], mass, at_least)]
        places.sort()
        return places
    while n_tried < len(keys):
        places = largest(keys, n_tried)
        among = keys[places]
        n = n_to_reach(weights[places][(-among).argsort()], mass, at_least)
        if n <= n_tried:
            return places[largest(among, n)]
        n_tried *= 8
    return largest(keys, n_to_reach(weights[(-keys).argsort()], mass, at_least))


def n_to_reach(ranked: Values, mass: float, at_least: int) -> int:
    """The number of first weights whose sum reaches ``mass``; if all do not reach it, one more than their count."""
    return max(at_least, 1 + int(np.add.accumulate(ranked, dtype=np.float64).searchsorted(mass)))


def _kth_largest(values: Values, k: int) -> float:
    moved = values.copy()
    moved.partition(len(moved) - k)
    return float(moved[len(moved) - k])


def shortlist(values: Values, k: int) -> Candidates | None:
    """Indices, ascending, and values of a subset with the k largest; None if the whole row must be searched.

    The k-th largest of the maxima of disjoint groups is a bound: k values reach it, and only groups whose maximum does
    have any. One pass finds the maxima; of the rest, next to nothing is read, where a partition moves all of it. None
    also where that bound is -inf, or the largest value is not finite.
    """
    n_rows = 1 << math.isqrt(len(values) // (4 * k)).bit_length()  # a power of two, by which most vocabularies divide
    n_groups = len(values) // n_rows  # about the number of values read after the pass
    if n_groups < 4 * k:
        return None
    grouped, rest = values[: n_rows * n_groups].reshape(n_rows, n_groups), values[n_rows * n_groups :]
    maxima: Values = np.maximum.reduce(grouped, axis=0)  # a column is a group
    if len(rest):
        np.maximum(maxima[: len(rest)], rest, out=maxima[: len(rest)])
    bound = _kth_largest(maxima, k)
    if bound == -math.inf or not math.isfinite(best_of(maxima)):
        return None
    groups = (maxima >= bound).nonzero()[0]
    pool = grouped.take(groups, axis=1).ravel()
    pooled = (pool >= bound).nonzero()[0]
    row, group = np.divmod(pooled, len(groups))
    places, kept = row * n_groups + groups[group], pool[pooled]
    late = (rest >= bound).nonzero()[0] if len(rest) else rest
    if len(late):
        return np.concatenate([places, n_rows * n_groups + late]), np.concatenate([kept, rest[late]])
    return places, kept
