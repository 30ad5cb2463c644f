"""The sequences of a context: in use by requests, kept as prefixes for later prompts, or free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from slm_core.engine.prefixes import LEAST_SHARED, NO_MATCH, Match, PrefixCache
from slm_core.engine.write_behind import WriteBehind
from slm_core.errors import ContextFull
from slm_core.protocols import Context
from slm_core.types import Capability, EditLevel, Pos


class Sequences:
    """Assigns sequences to requests, and keeps the sequences of answered requests until their room is needed.

    Args:
        context: the context of the sequences; no other code creates or drops sequences in it.
        keeps: whether sequences of answered requests are kept.
        cuts: whether ranges that a prompt lacks may be cut out of kept sequences, so that the prompt reuses more.
        disk: writes kept sequences to disk; None for no disk tier.

    Attributes:
        shares_forks: whether a fork takes no positions.
        can_fork_inside: whether a part of a sequence can be forked.
    """

    def __init__(self, context: Context, *, keeps: bool, cuts: bool = False, disk: WriteBehind | None = None) -> None:
        self._context = context
        self._keeps = keeps
        self._cuts = cuts
        self._disk = disk
        self._n_exact: dict[int, int] = {}  # by sequence: tokens before the first one that a cut moved; absent if none
        self._adapted: set[int] = set()  # sequences that had adapters, and may still have them
        self._free = list(reversed(range(context.n_seq_max)))
        self.shares_forks = Capability.SHARED_FORK in context.capabilities
        self.can_fork_inside = context.edit_level >= EditLevel.TRUNCATE
        self._kept = PrefixCache(whole=not self.can_fork_inside)

    @property
    def n_kept(self) -> int:
        """Sequences of answered requests that are kept for later prompts."""
        return len(self._kept)

    @property
    def n_available(self) -> int:
        """Free positions, and positions that only one kept sequence uses."""
        return self._context.n_free + sum(self._context.n_exclusive(seq_id) for seq_id in self._kept.seq_ids)

    def length(self, seq_id: int) -> int:
        """The number of positions of a sequence."""
        return self._context.length(seq_id)

    def n_exact(self, seq_id: int) -> int:
        """Tokens of a sequence before the first token whose keys and values depend on removed tokens."""
        return self._n_exact.get(seq_id, self._context.length(seq_id))

    def set_exact(self, seq_id: int, n_tokens: int) -> None:
        """Record that the tokens of a sequence from ``n_tokens`` on depend on removed tokens."""
        n_exact = min(self.n_exact(seq_id), n_tokens)
        self._n_exact.pop(seq_id, None)
        if n_exact < self._context.length(seq_id):
            self._n_exact[seq_id] = n_exact

    def match(self, tokens: NDArray[np.int32], salt: str) -> Match:
        """The kept sequence with the most of ``tokens`` that a fork (without decoding) or a cut can provide."""
        if not self._keeps:
            return NO_MATCH
        best = NO_MATCH
        for match in self._kept.matches(tokens, salt):  # longest common prefix first
            assert match.seq_id is not None
            if match.n_shared <= best.n_shared:
                break
            n_reusable = self.n_forkable(match.seq_id, match.n_shared)
            if n_reusable > max(best.n_shared, LEAST_SHARED - 1):
                best = Match(match.seq_id, n_reusable)
        if self._cuts:
            best = max(best, self._kept.match_with_gaps(tokens, salt), key=lambda match: match.n_shared)
        if best.seq_id is not None:
            self._kept.used(best.seq_id)
        return best

    def forks_anywhere(self, seq_id: int) -> bool:
        """Whether any part of a sequence can be forked without decoding. Only the longest part is tested."""
        length = self._context.length(seq_id)
        return self.can_fork_inside and (length < 2 or self._context.fork_cost(seq_id, length - 1) == 0)

    def n_forkable(self, seq_id: int, n_tokens: int) -> int:
        """The longest prefix of a sequence, up to ``n_tokens``, that can be forked without decoding."""
        if n_tokens == self._context.length(seq_id):
            return n_tokens
        if not self.can_fork_inside:
            return 0
        n_free = n_tokens - self._context.fork_cost(seq_id, n_tokens)
        return n_free if n_free == n_tokens or self._context.fork_cost(seq_id, n_free) == 0 else 0

    def take(
        self, source: Match = NO_MATCH, n_spare: int = 0, adapters: Mapping[str, float] = MappingProxyType({})
    ) -> int:
        """Take a sequence for a request, filled with ``source.n_shared`` tokens of its prompt.

        Args:
            source: the sequence that has these tokens, of the same adapters.
            n_spare: positions that no other request needs. If forks copy, the copy of a kept sequence goes here; if
                there are too few, the request gets the kept sequence itself.
            adapters: the adapters of the request.

        Raises:
            SlmError: the context refuses the fork, the cut or the adapters; no sequence is lost.
        """
        if not self._free and (candidates := [seq_id for seq_id in self._kept.seq_ids if seq_id != source.seq_id]):
            self._evict(candidates[0])
        if source.seq_id is None:
            self._set_adapters(self._free[-1], adapters)
            return self._free.pop()
        can_copy = source.seq_id not in self._kept or self.shares_forks or n_spare >= source.n_shared
        if self._free and can_copy and not source.gaps:
            if not self.shares_forks:
                self.make_room(source.n_shared)
            self._fork(source.seq_id, self._free[-1], source.n_shared)
            return self._free.pop()
        return self._continued(source)

    def keep_copy(self, seq_id: int, salt: str, n_spare: int) -> bool:
        """Keep a copy of a sequence for other prompts while its request continues; returns whether there was room.

        Args:
            seq_id: the sequence.
            salt: the salt of the request.
            n_spare: positions that no other request needs.
        """
        length = self._context.length(seq_id)
        tokens = np.asarray(self._context.tokens(seq_id), np.int32)
        if not self._keeps or length < LEAST_SHARED or not (self.shares_forks or n_spare >= length):
            return False
        if not self._free:
            if not len(self._kept):
                return False
            self._evict(self._kept.seq_ids[0])
        self._fork(seq_id, self._free[-1], length)
        self._keep(self._free.pop(), tokens, salt)
        return True

    def release(self, seq_id: int, salt: str) -> Future[bool] | None:
        """Keep the sequence of an answered request for later prompts, if it is long enough.

        Returns a future, whose result is whether the sequence is on disk; None if it will not be written.
        """
        if not self._keeps or self._context.length(seq_id) < LEAST_SHARED:
            self.drop(seq_id)
            return None
        tokens = np.asarray(self._context.tokens(seq_id), np.int32)
        self._keep(seq_id, tokens, salt)
        if self._disk is None or seq_id in self._n_exact:  # a dump does not record which tokens a cut moved
            return None
        return self._disk.add(seq_id, tokens, salt)

    def drop(self, seq_id: int) -> None:
        """Drop a sequence that is no longer needed."""
        self._context.drop(seq_id)
        self._n_exact.pop(seq_id, None)
        self._free.append(seq_id)

    def make_room(self, n_positions: int) -> None:
        """Drop kept sequences, least recently used first, until ``n_positions`` are free or none is kept."""
        while self._context.n_free < n_positions and len(self._kept):
            self._evict(self._kept.seq_ids[0])

    def _keep(self, seq_id: int, tokens: NDArray[np.int32], salt: str) -> None:
        for covered in self._kept.keep(seq_id, tokens, salt):
            self._forget_on_disk(covered)
            self.drop(covered)

    def _evict(self, seq_id: int) -> None:
        self._kept.forget(seq_id)
        self._forget_on_disk(seq_id)
        self.drop(seq_id)

    def _forget_on_disk(self, seq_id: int) -> None:
        if self._disk is not None:
            self._disk.forget(seq_id)

    def _fork(self, src: int, dst: int, length: int) -> None:
        self._context.fork(src, dst, length)
        if src in self._adapted:
            self._adapted.add(dst)
        if self.n_exact(src) < length:
            self._n_exact[dst] = self._n_exact[src]

    def _continued(self, source: Match) -> int:
        """Take the kept sequence itself, truncated and cut, if a copy has no sequence or no room."""
        assert source.seq_id is not None
        seq_id = source.seq_id
        self._kept.forget(seq_id)
        self._forget_on_disk(seq_id)
        try:
            length = source.n_shared + sum(end - start for start, end in source.gaps)
            if self._context.length(seq_id) > length:
                self._context.truncate(Pos(seq_id, length))
            self._cut(seq_id, source.gaps)
        except BaseException:
            self.drop(seq_id)
            raise
        self.set_exact(seq_id, source.gaps[0][0] if source.gaps else source.n_shared)
        return seq_id

    def _set_adapters(self, seq_id: int, adapters: Mapping[str, float]) -> None:
        if adapters or seq_id in self._adapted:
            self._context.set_adapters(seq_id, adapters)
            self._adapted.add(seq_id)

    def _cut(self, seq_id: int, gaps: Sequence[tuple[int, int]]) -> None:
        try:
            for start, end in reversed(gaps):
                self._context.cut(Pos(seq_id, start), Pos(seq_id, end))
        except ContextFull:  # shared tokens would have to be copied: use only the tokens before the gaps
            self._context.truncate(Pos(seq_id, gaps[0][0]))
