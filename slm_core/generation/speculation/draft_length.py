"""How many tokens to draft: as many as pay, by what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

_FASTER, _SLOWER = 0.5, 0.1  # weight of a new time: a shorter one is nearer to the cost, a longer one was disturbed
_MEMORY = 0.95  # of hits: the last twenty or so tokens count
_PRIOR_HITS, _PRIOR_TRIALS = 1.0, 1.5
_FORGOTTEN = 64  # rounds
_FIRST_WAIT, _LONGEST_WAIT = 8, 256
_PROBE = 4
_PROBED_TRIALS = 2.0  # what was found before a probe counts as much as so many tokens


class DecodeCosts:
    """Seconds of a decode by its number of tokens, measured where there was one lately and interpolated elsewhere."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._n_measured = 0

    def measured(self, n_tokens: int, seconds: float) -> None:
        """Take note of a decode, and forget sizes that were not seen for long: costs grow with the history."""
        self._seconds[n_tokens] = _smoothed(self._seconds.get(n_tokens), seconds)
        self._n_measured += 1
        self._measured_at[n_tokens] = self._n_measured
        for size, at in list(self._measured_at.items()):
            if self._n_measured - at > _FORGOTTEN:
                del self._seconds[size], self._measured_at[size]

    def expected(self, n_most: int) -> list[float]:
        """Seconds of decodes of 1 to ``n_most`` tokens; beyond those measured, as from the first to the last."""
        sizes = sorted(self._seconds)
        if not sizes:
            return [0.0] * n_most
        found = [self._seconds[sizes[0]]] * sizes[0]
        for a, b in pairwise(sizes):
            found += self._between(a, b, range(a + 1, b))
            found.append(self._seconds[b])
        found += self._between(sizes[0], sizes[-1], range(sizes[-1] + 1, n_most + 1))
        return found[:n_most]

    @property
    def has_single(self) -> bool:
        """Whether a decode of one token was measured."""
        return 1 in self._seconds

    def _between(self, a: int, b: int, sizes: Iterable[int]) -> list[float]:
        slope = max(0.0, self._seconds[b] - self._seconds[a]) / max(1, b - a)
        return [self._seconds[a] + slope * (n - a) for n in sizes]


class AdaptiveDraftLength:
    """Chooses the length of each draft.

    A draft of k tokens, each right with probability a where those before it were, gives (1 - a^(k+1)) / (1 - a) tokens
    a round (Leviathan et al. 2023); a round costs k times a drafted token and a decode of k + 1. The k with the most
    tokens a second is taken. Where that is none, drafting is off, and is tried again after a while: after 8 rounds at
    first, after twice as many each time it still does not pay.

    Args:
        n_max: the longest draft.
        adaptive: False drafts ``n_max`` tokens always.

    Attributes:
        n_switched_off: how often drafting stopped to pay.
        n_switched_on: how often it paid again.
    """

    def __init__(self, n_max: int, *, adaptive: bool) -> None:
        self._n_max = n_max
        self._adaptive = adaptive
        self._costs = DecodeCosts()
        self._has_drafted = False
        self._drafting_s: float | None = None  # of a drafted token
        self._hits, self._trials = _PRIOR_HITS, _PRIOR_TRIALS
        self.on = True
        self._wait, self._left = _FIRST_WAIT, 0
        self.n_switched_off = self.n_switched_on = 0

    @property
    def acceptance(self) -> float:
        """How often a drafted token was right lately, where those before it were."""
        return self._hits / self._trials

    def length(self) -> int:
        """Tokens to draft in this round."""
        if not self._adaptive:
            return self._n_max
        if not self._costs.has_single:
            return 0
        if not self.on:
            return self._probe()
        best = self._best()
        if not best:
            self.on, self._left = False, self._wait
            self.n_switched_off += 1
        return best

    def drafted(self, n_tokens: int, seconds: float) -> None:
        """A draft of at least one token was made; the first, for which the history was read, is not counted."""
        if not self._has_drafted:
            self._has_drafted = True
            return
        self._drafting_s = _smoothed(self._drafting_s, seconds / n_tokens)

    def decoded(self, n_tokens: int, seconds: float) -> None:
        """A round was decoded."""
        self._costs.measured(n_tokens, seconds)

    def verified(self, hits: Sequence[bool]) -> None:
        """Which tokens of a draft were right; those after a wrong one are not known."""
        for hit in hits:
            self._hits = _MEMORY * self._hits + hit
            self._trials = _MEMORY * self._trials + 1

    def _best(self) -> int:
        """The length with the most tokens a second; the shortest of equal ones."""
        likely, drafting_s = min(self.acceptance, 0.999), self._drafting_s or 0.0
        best, highest, n_tokens = 0, 0.0, 0.0
        for k, seconds in enumerate(self._costs.expected(self._n_max + 1)):
            n_tokens += likely**k
            rate = n_tokens / max(1e-9, k * drafting_s + seconds)
            if rate > highest:
                best, highest = k, rate
        return best

    def _probe(self) -> int:
        """Off: count down; then draft a little, and see in the next round whether it pays."""
        if self._left > 0:
            self._left -= 1
            return 0
        if self._left < 0 and (best := self._best()):
            self.on, self._wait = True, _FIRST_WAIT
            self.n_switched_on += 1
            return best
        if self._left < 0:
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
            self._left = self._wait
            return 0
        self._left = -1
        share = min(1.0, _PROBED_TRIALS / self._trials)
        self._hits, self._trials = share * self._hits, share * self._trials
        return min(_PROBE, self._n_max)


def _smoothed(before: float | None, seconds: float) -> float:
    if before is None:
        return seconds
    return before + (_FASTER if seconds < before else _SLOWER) * (seconds - before)
