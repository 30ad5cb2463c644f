"""Measurements of requests: times, histograms since the start, and rates and percentiles of the last minute."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

WINDOW_S = 60.0
"""Length of a window, in seconds; its start moves in steps of ``SLOT_S``."""
SLOT_S = 5.0
EWMA_S = 10.0
"""Time constant of an exponentially weighted moving average, in seconds: the weight of a value falls to 1/e."""
ACCURACY = 0.01
"""Relative error of a window's percentiles."""
_GAMMA = (1 + ACCURACY) / (1 - ACCURACY)
_LOG_GAMMA = math.log(_GAMMA)
_SHORTEST_S, _LONGEST_S = 1e-7, 1e7
_N_SLOTS = round(WINDOW_S / SLOT_S)
_MOST_PENDING = 1024
"""The largest number of values of a slot that are counted together, which is several times faster than one by one."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The metrics of a request, in tokens and seconds; seconds are None for phases that the request did not reach.

    Attributes:
        request_id: its id.
        finish_reason: a ``FinishReason``; "error" if it failed, None while it is not over. An answer with tool calls
            has "stop", because the chat format is parsed later.
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens that were cached.
        completion_tokens: tokens of the answer.
        n_preempted: how often it was preempted.
        queue_s: from the call to its sequence.
        prefill_s: from its sequence to the first token.
        first_token_s: from the call to the first token: ``queue_s`` and ``prefill_s`` together.
        decode_s: from the first token to the last.
        inter_token_p50_s: median of the times between two tokens.
        inter_token_p95_s: their 95th percentile.
        total_s: from the call to the end.
    """

    request_id: str
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    n_preempted: int
    queue_s: float | None
    prefill_s: float | None
    first_token_s: float | None
    decode_s: float | None
    inter_token_p50_s: float | None
    inter_token_p95_s: float | None
    total_s: float | None


class RequestTimes:
    """The times of a request's events, in seconds of the engine's clock.

    Attributes:
        arrived: the time of the call.
        started: the time of its first sequence; None before.
        ended: the time of its end; None before.
        tokens: the time of each token of the answer.
        n_counted: the number of tokens that the engine's statistics already contain.
    """

    __slots__ = ("arrived", "ended", "n_counted", "started", "tokens")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.started: float | None = None
        self.ended: float | None = None
        self.tokens = array("d")
        self.n_counted = 0

    @property
    def queue_s(self) -> float | None:
        """See ``RequestMetrics``."""
        return None if self.started is None else self.started - self.arrived

    @property
    def prefill_s(self) -> float | None:
        """See ``RequestMetrics``."""
        return None if self.started is None or not self.tokens else self.tokens[0] - self.started

    @property
    def first_token_s(self) -> float | None:
        """See ``RequestMetrics``."""
        return self.tokens[0] - self.arrived if self.tokens else None

    @property
    def decode_s(self) -> float | None:
        """See ``RequestMetrics``."""
        return self.tokens[-1] - self.tokens[0] if self.tokens else None

    @property
    def total_s(self) -> float | None:
        """See ``RequestMetrics``."""
        return None if self.ended is None else self.ended - self.arrived

    def inter_token_s(self, *ranks: float) -> list[float | None]:
        """Percentiles of the times between two tokens, by nearest rank; each rank is in (0, 1]."""
        gaps = np.sort(np.diff(np.array(self.tokens[:])))  # a copy: the engine's thread may add a token meanwhile
        return [float(gaps[nearest_rank(len(gaps), rank)]) if len(gaps) else None for rank in ranks]


def nearest_rank(n: int, rank: float) -> int:
    """The index of a percentile in ``n`` sorted values: at least a share ``rank`` of the values is not above it."""
    return max(0, math.ceil(rank * n - 1e-9) - 1)


class Histogram:
    """Counts of values by bucket since the start.

    Args:
        bounds: upper ends of the buckets, ascending; one more bucket holds values above all bounds.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def add_all(self, values: NDArray[np.float64]) -> None:
        """Count values."""
        buckets = np.searchsorted(self._bounds, values, side="left")
        counts = np.bincount(buckets, minlength=len(self._counts)).tolist()
        self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]
        self._total += float(values.sum())

    def snapshot(self) -> HistogramCounts:
        """The counts so far."""
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A histogram at one moment.

    Attributes:
        bounds: upper ends of the buckets, ascending.
        counts: values in each bucket; the last bucket holds values above all bounds.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(slots=True)
class _Slot:
    """Part of a window: a sum, and counts of values by the bucket of ``_buckets``; ``pending`` are not counted yet."""

    number: int
    n: int = 0
    total: float = 0.0
    counts: dict[int, int] = field(default_factory=dict)
    pending: list[float] = field(default_factory=list)


class _Slots:
    """The last ``WINDOW_S`` seconds in slots of ``SLOT_S``; memory does not grow with the number of values."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque(maxlen=_N_SLOTS)

    def at(self, now: float) -> _Slot:
        """The slot of this moment."""
        number = int(now // SLOT_S)
        if not self._slots or self._slots[-1].number < number:
            self._slots.append(_Slot(number))
        return self._slots[-1]

    def recent(self, now: float) -> list[_Slot]:
        """The slots of the window that ends now."""
        oldest = _oldest(now)
        return [slot for slot in self._slots if slot.number >= oldest]


def _oldest(now: float) -> int:
    return int(now // SLOT_S) - _N_SLOTS + 1


def _buckets(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """The buckets of values: bucket ``i`` holds values in (gamma ** (i - 1), gamma ** i].

    Source: Masson, Rim, Lee: DDSketch: a fast and fully-mergeable quantile sketch (2019).
    """
    logs: NDArray[np.float64] = np.log(values.clip(_SHORTEST_S, _LONGEST_S))
    return np.ceil(logs / _LOG_GAMMA).astype(np.int64)


def _value(bucket: int) -> float:
    """A value within ``ACCURACY`` of all values of a bucket."""
    return float(2 * _GAMMA**bucket / (_GAMMA + 1))


class _Ewma:
    """Sums with exponentially decaying addends, with the time constant ``EWMA_S``."""

    def __init__(self, now: float) -> None:
        self._since = self._at = now
        self._total = self._weight = 0.0

    def add(self, now: float, total: float, weight: float = 1.0) -> None:
        """Add a value, or the sum of ``weight`` values."""
        decay = math.exp((self._at - now) / EWMA_S) if now > self._at else 1.0
        self._total = self._total * decay + total
        self._weight = self._weight * decay + weight
        self._at = max(self._at, now)

    def rate(self, now: float) -> float:
        """The rate per second, corrected for the short time since the start."""
        full = -math.expm1((self._since - now) / EWMA_S)
        return self._total * math.exp((self._at - now) / EWMA_S) / (EWMA_S * full) if full > 0 else 0.0

    @property
    def mean(self) -> float | None:
        """The mean of the values; None if there are none."""
        return self._total / self._weight if self._weight > 0 else None


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate per second.

    Attributes:
        window: the rate of the last minute, or since a later start.
        ewma: exponentially weighted moving average with a time constant of 10 seconds.
    """

    window: float
    ewma: float

    def __str__(self) -> str:
        return f"{self.window:.3g} (EWMA {self.ewma:.3g})"


class RateMeter:
    """Measures a ``Rate``.

    Args:
        now: the time at the start.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._slots = _Slots()
        self._ewma = _Ewma(now)

    def add(self, now: float, n: int) -> None:
        """Count ``n`` events."""
        self._slots.at(now).n += n
        self._ewma.add(now, n)

    def rate(self, now: float) -> Rate:
        """The rate at this moment."""
        seconds = now - max(self._since, _oldest(now) * SLOT_S)
        n = sum(slot.n for slot in self._slots.recent(now))
        return Rate(n / seconds if seconds > 0 else 0.0, self._ewma.rate(now))


@dataclass(frozen=True, slots=True)
class Latency:
    """A latency of the last minute, in seconds; None without measurements.

    Attributes:
        n: the number of measurements.
        mean: the mean.
        p50: the median; like the other percentiles within 1 % of the measured value of that rank.
        p95: the 95th percentile.
        p99: the 99th percentile.
        ewma: exponentially weighted moving average with a time constant of 10 seconds, which includes older values.
    """

    n: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    ewma: float | None

    def __str__(self) -> str:
        if not self.n:
            return "none"
        return " ".join(f"{name} {seconds(getattr(self, name))}" for name in ("p50", "p95", "p99")) + f" (n {self.n})"


class LatencyMeter:
    """Measures a ``Latency``, and its histogram since the start.

    Args:
        now: the time at the start.
        bounds: buckets of the histogram since the start.
    """

    def __init__(self, now: float, bounds: Sequence[float]) -> None:
        self._histogram = Histogram(bounds)
        self._slots = _Slots()
        self._slot = self._slots.at(now)
        self._ewma = _Ewma(now)

    def add(self, now: float, values: Sequence[float]) -> None:
        """Add measured seconds."""
        if not values:
            return
        slot = self._slots.at(now)
        if slot is not self._slot or len(slot.pending) >= _MOST_PENDING:
            self._count_pending()
            self._slot = slot
        total = sum(values)
        slot.pending += values
        slot.n += len(values)
        slot.total += total
        self._ewma.add(now, total, len(values))

    @property
    def histogram(self) -> HistogramCounts:
        """The values since the start."""
        self._count_pending()
        return self._histogram.snapshot()

    def _count_pending(self) -> None:
        slot = self._slot
        if not slot.pending:
            return
        values = np.array(slot.pending)
        slot.pending.clear()
        self._histogram.add_all(values)
        for bucket, n in zip(*np.unique(_buckets(values), return_counts=True), strict=True):
            slot.counts[int(bucket)] = slot.counts.get(int(bucket), 0) + int(n)

    def latency(self, now: float) -> Latency:
        """The latency at this moment."""
        self._count_pending()
        slots = self._slots.recent(now)
        n, total = sum(slot.n for slot in slots), sum(slot.total for slot in slots)
        if not n:
            return Latency(0, None, None, None, None, self._ewma.mean)
        counts: dict[int, int] = {}
        for slot in slots:
            for bucket, count in slot.counts.items():
                counts[bucket] = counts.get(bucket, 0) + count
        p50, p95, p99 = _percentiles(counts, n, (0.5, 0.95, 0.99))
        return Latency(n, total / n, p50, p95, p99, self._ewma.mean)


def _percentiles(counts: dict[int, int], n: int, ranks: Sequence[float]) -> list[float]:
    buckets = sorted(counts)
    ends = np.cumsum([counts[bucket] for bucket in buckets])
    return [_value(buckets[int(np.searchsorted(ends, nearest_rank(n, rank), side="right"))]) for rank in ranks]


def seconds(value: float | None) -> str:
    """Seconds as text."""
    if value is None:
        return "-"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
