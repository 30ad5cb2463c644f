"""Where the prefix of a request's history comes from: another sequence, a dump on disk, or neither."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slm_core.engine.costs import StepCosts, attended
from slm_core.engine.disk import DiskTier
from slm_core.engine.prefixes import LEAST_SHARED, NO_MATCH, Match, n_common
from slm_core.engine.requests import Request
from slm_core.engine.sequences import Sequences
from slm_core.engine.store import StoredPrefix


@dataclass(frozen=True, slots=True)
class Source:
    """The best available prefix of a history.

    Attributes:
        match: the sequence, and the number of tokens of the history that it holds.
        n_saved: positions that sharing saves. A kept sequence saves none, because its positions already count as free.
        is_computed_now: whether an active request is about to compute a longer common prefix; the request should wait
            for it.
        stored: a dump on disk, instead of a sequence.
    """

    match: Match = NO_MATCH
    n_saved: int = 0
    is_computed_now: bool = False
    stored: StoredPrefix | None = None


class Sources:
    """Finds the best source of a history.

    Args:
        sequences: the sequences of the context.
        disk: dumps of earlier sequences; None for no disk tier.
        costs: estimates the time of decoding.
    """

    def __init__(self, sequences: Sequences, disk: DiskTier | None, costs: StepCosts) -> None:
        self._sequences = sequences
        self._disk = disk
        self._costs = costs

    def find(self, request: Request, active: Iterable[Request]) -> Source:
        """The source with the most tokens of a request's history, if it is faster than computing them.

        If a waiting request needs a prefix of an active one whose sequence cannot be forked anywhere, the active
        request ends a step at the end of the common prefix.
        """
        source = self._in_memory(request, active)
        if self._disk is None or source.is_computed_now:
            return source
        stored = self._disk.find(request.id, request.waiting_tokens, request.salt)
        n_more = 0 if stored is None else stored.n_shared - source.match.n_shared
        if stored is None or n_more < LEAST_SHARED or stored.n_tokens > self._sequences.n_available:
            return source
        read_s = self._disk.seconds(stored)
        compute_s = self._costs.seconds(n_more, attended(source.match.n_shared, n_more))
        is_faster = read_s is None or compute_s is None or read_s < compute_s
        return Source(stored=stored) if is_faster else source

    def _in_memory(self, request: Request, active: Iterable[Request]) -> Source:
        cached = self._sequences.match(request.waiting_tokens, request.salt)
        n_cached, n_usable = cached.n_shared, len(request.waiting_tokens) - 1
        shared = [
            (min(n_common(other.waiting_tokens, request.waiting_tokens), n_usable), other)
            for other in active
            if other.salt == request.salt
        ]
        n_shared, other = max(shared, key=lambda pair: pair[0], default=(0, None))
        if other is None or other.seq_id is None or n_shared < n_cached + LEAST_SHARED:
            return Source(cached)
        if self._sequences.length(other.seq_id) < n_shared:
            if not self._sequences.forks_anywhere(other.seq_id):
                other.stop_at(n_shared)
            return Source(cached, is_computed_now=True)
        n_reusable = self._sequences.n_forkable(other.seq_id, n_shared)
        if n_reusable < n_cached + LEAST_SHARED:
            return Source(cached)
        return Source(Match(other.seq_id, n_reusable), n_saved=n_reusable if self._sequences.shares_forks else 0)
