"""Shared arithmetic: log-sum-exp, log probabilities, common prefixes, integers of any type."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import SamplingError

Floats = NDArray[np.floating[Any]]

_SAFE = 1e26
"""A float32 sum of exponentials between the inverse and this has neither overflowed nor lost significant terms."""


class _Scratch(threading.local):
    """A scratch row per thread: allocating a row per token would take as long as computing it."""

    row = np.empty(0, np.float32)


_scratch = _Scratch()


def as_integer(value: object) -> int | None:
    """An integer of any type as a Python int, which does not wrap as NumPy's integers do; None for other values."""
    try:
        return int(operator.index(value))  # type: ignore[arg-type]  # it raises for other values
    except TypeError:
        return None


def as_finite(value: object) -> float | None:
    """A finite number as a float; None for anything else, such as an integer that is too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def shown(value: object) -> str:
    """The ``repr`` of a value for an error message, in one line of at most 80 characters."""
    try:
        return f"{' '.join(repr(value).split()):.80}"
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        return "an integer of thousands of digits"


def log_sum_exp(logits: Floats, *, dtype: type[np.floating[Any]] | None = None) -> float:
    """The logarithm of the sum of exponentials of logits [n]: a logit minus the result is a log probability.

    Args:
        logits: any floats; the largest one is finite.
        dtype: the type of the sum; None for the type of the logits.
    """
    best = logits[logits.argmax()]  # for few values, in a third of the time of max()
    weights = logits - best
    np.exp(weights, out=weights)
    return float(best) + math.log(weights.sum(dtype=dtype))


def checked_log_sum_exp(row: NDArray[np.float32]) -> float:
    """``log_sum_exp`` of logits, float32 [V].

    Raises:
        SamplingError: the row has no finite largest logit.
    """
    with np.errstate(invalid="ignore"):
        total = log_sum_exp(row, dtype=np.float64)
    if not math.isfinite(total):
        raise SamplingError(f"no token can be chosen: the largest logit is {float(row.max())}")
    return total


def log_probability(logits: NDArray[np.float32], token: int) -> float:
    """Natural logarithm of a token's probability under one row of logits, float32 [V]; at most 0, despite rounding."""
    logprob = _log_probability(logits, token)
    return 0.0 if logprob > 0 else logprob


def _log_probability(logits: NDArray[np.float32], token: int) -> float:
    if len(_scratch.row) != len(logits):
        _scratch.row = np.empty(len(logits), np.float32)
    with np.errstate(over="ignore"):
        total = float(np.einsum("i->", np.exp(logits, out=_scratch.row)))  # in half the time of sum()
    if 1 / _SAFE < total < _SAFE:  # the usual case: the maximum need not be subtracted
        return float(logits[token]) - math.log(total)
    best = logits.max()
    total = float(np.einsum("i->", np.exp(np.subtract(logits, best, out=_scratch.row), out=_scratch.row)))
    return float(logits[token]) - float(best) - math.log(total)


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """The length of the common prefix."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])
