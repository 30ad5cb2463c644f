"""Adaptive draft length: the number of tokens that pays best, by measured times and acceptance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

_FASTER, _SLOWER = 0.5, 0.1  # weight of a new time: a shorter time is more reliable, a longer time was disturbed
_MEMORY = 0.95  # decay of hits: about the last twenty tokens count
_PRIOR_HITS, _PRIOR_TRIALS = 1.0, 1.5
_FORGOTTEN = 64  # rounds
_ASSUMED_SLOPE = 0.5  # cost of each further token of a decode, in decodes of one token, before it is measured
_FIRST_WAIT, _LONGEST_WAIT = 8, 256
_PROBE = 4
_PROBED_TRIALS = 2.0  # weight, in tokens, of the acceptance before a probe
_CHEAP = 0.02  # share of a decode's time: a cheaper draft is compared with the answer while drafting is off


class RoundCosts(Protocol):
    """The cost of draft rounds."""

    @property
    def has_single(self) -> bool:
        """Whether the cost of a round without a draft is known."""
        ...

    @property
    def n_others(self) -> float:
        """Tokens that other requests get from the same decode."""
        ...

    @property
    def varies(self) -> bool:
        """Whether costs vary between rounds, because other requests share the decode."""
        ...

    def expected(self, n_most: int) -> list[float]:
        """Seconds of decodes with 1 to ``n_most`` tokens of this answer, without decodes that are too long."""
        ...

    def measured(self, n_tokens: int, seconds: float) -> None:
        """Record the time of a decode with ``n_tokens`` tokens of this answer."""
        ...


class DecodeCosts:
    """The time of a decode by its number of tokens, interpolated between recent measurements.

    If only decodes of one token were measured recently, further tokens are assumed to cost half as much as the first,
    or less if less was measured before.

    Attributes:
        n_others: 0, because no other request shares the decode.
        varies: False.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._n_measured = 0
        self._slope = _ASSUMED_SLOPE
        self.n_others = 0.0
        self.varies = False

    def measured(self, n_tokens: int, seconds: float) -> None:
        """Record a decode. Old measurements of other sizes are removed, because costs grow with the history."""
        self._seconds[n_tokens] = _smoothed(self._seconds.get(n_tokens), seconds)
        self._n_measured += 1
        self._measured_at[n_tokens] = self._n_measured
        for size, at in list(self._measured_at.items()):
            if self._n_measured - at > _FORGOTTEN:
                self._forget(size)

    def _forget(self, size: int) -> None:
        seconds = self._seconds.pop(size)
        del self._measured_at[size]
        if size > 1 and self.has_single:
            slope = (seconds / max(1e-9, self._seconds[1]) - 1) / (size - 1)
            self._slope = min(_ASSUMED_SLOPE, max(0.0, slope))

    def expected(self, n_most: int) -> list[float]:
        """Seconds of decodes of 1 to ``n_most`` tokens, interpolated, and extrapolated from the first and last size."""
        sizes = sorted(self._seconds)
        if not sizes:
            return [0.0] * n_most
        if sizes == [1]:
            return [self._seconds[1] * (1 + self._slope * i) for i in range(n_most)]
        seconds = [self._seconds[sizes[0]]] * sizes[0]
        for a, b in pairwise(sizes):
            seconds += self._between(a, b, range(a + 1, b))
            seconds.append(self._seconds[b])
        seconds += self._between(sizes[0], sizes[-1], range(sizes[-1] + 1, n_most + 1))
        return seconds[:n_most]

    @property
    def has_single(self) -> bool:
        """Whether a decode of one token was measured."""
        return 1 in self._seconds

    def _between(self, a: int, b: int, sizes: Iterable[int]) -> list[float]:
        slope = max(0.0, self._seconds[b] - self._seconds[a]) / max(1, b - a)
        return [self._seconds[a] + slope * (n - a) for n in sizes]


class AdaptiveDraftLength:
    """Chooses the length of each draft.

    Let a be the probability that a drafted token is accepted if all earlier ones are. A draft of k tokens gives
    (1 - a^(k+1)) / (1 - a) tokens per round (Leviathan et al. 2023). A round costs k drafted tokens and a decode of
    k + 1 tokens. The class chooses the k with the most tokens per second, including tokens of other requests in the
    same decode. If k is 0, drafting is off. Drafts that take little time are then only compared with the answer, so
    that drafting is on again as soon as it pays. Other drafts are tried again after 8 rounds, then after twice as many
    each time they still do not pay.

    Args:
        n_max: the longest draft.
        adaptive: False always drafts ``n_max`` tokens.
        costs: the cost of rounds; None to measure it.

    Attributes:
        n_switched_off: how often drafting was turned off.
        n_switched_on: how often drafting was turned on again.
    """

    def __init__(self, n_max: int, *, adaptive: bool, costs: RoundCosts | None = None) -> None:
        self._n_max = n_max
        self._adaptive = adaptive
        self._costs = DecodeCosts() if costs is None else costs
        self._has_drafted = False
        self._drafting_s: float | None = None  # per drafted token
        self._hits, self._trials = _PRIOR_HITS, _PRIOR_TRIALS
        self.on = True
        self._wait, self._left = _FIRST_WAIT, 0  # rounds between probes; rounds until the next probe, -1 after a probe
        self.n_switched_off = self.n_switched_on = 0

    @property
    def acceptance(self) -> float:
        """The recent rate at which a drafted token is accepted if all earlier ones are."""
        return self._hits / self._trials

    def length(self) -> int:
        """Tokens to draft in this round."""
        if not self._adaptive:
            return self._n_max
        if not self._costs.has_single:
            return 0
        seconds = self._costs.expected(self._n_max + 1)
        if len(seconds) < 2:
            return 0
        best = self._best(seconds)
        if self.on:
            if not best:
                self.on, self._left = False, self._wait
                self.n_switched_off += 1
            return best
        if best and (self.n_compared or self._costs.varies or self._left < 0):
            self.on, self._wait = True, _FIRST_WAIT
            self.n_switched_on += 1
            return best
        return 0 if self.n_compared else self._probe(seconds)

    @property
    def n_compared(self) -> int:
        """Tokens to draft while drafting is off, only to compare them with the answer; 0 if that takes long."""
        if self.on or not self._adaptive:
            return 0
        single_s = self._costs.expected(1)[0]
        return _PROBE if _PROBE * (self._drafting_s or 0.0) <= _CHEAP * single_s else 0

    def drafted(self, n_tokens: int, seconds: float) -> None:
        """Record the time of a draft. The first draft is not counted, because it includes reading the history."""
        if not self._has_drafted:
            self._has_drafted = True
            return
        self._drafting_s = _smoothed(self._drafting_s, seconds / n_tokens)

    def decoded(self, n_tokens: int, seconds: float) -> None:
        """Record the time of a decoded round."""
        self._costs.measured(n_tokens, seconds)

    def verified(self, hits: Sequence[bool]) -> None:
        """Record which tokens of a draft were right, up to the first wrong token."""
        for hit in hits:
            self._hits = _MEMORY * self._hits + hit
            self._trials = _MEMORY * self._trials + 1

    def _best(self, decode_s: Sequence[float]) -> int:
        """The length with the most tokens per second; ties: the shortest."""
        likely, drafting_s = min(self.acceptance, 0.999), self._drafting_s or 0.0
        best, highest, n_tokens = 0, 0.0, self._costs.n_others
        for k, seconds in enumerate(decode_s):
            n_tokens += likely**k
            rate = n_tokens / max(1e-9, k * drafting_s + seconds)
            if rate > highest:
                best, highest = k, rate
        return best

    def _probe(self, decode_s: Sequence[float]) -> int:
        """While drafting is off: count down, then make a short draft to measure whether drafting pays."""
        if self._left > 0:
            self._left -= 1
            return 0
        if self._left < 0:
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
            self._left = self._wait
            return 0
        self._left = -1
        share = min(1.0, _PROBED_TRIALS / self._trials)
        self._hits, self._trials = share * self._hits, share * self._trials
        return min(_PROBE, len(decode_s) - 1)


def _smoothed(before: float | None, seconds: float) -> float:
    if before is None:
        return seconds
    return before + (_FASTER if seconds < before else _SLOWER) * (seconds - before)
