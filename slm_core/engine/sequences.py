"""The sequences of a context: those of requests, kept ones that prompts may go on from, and free ones."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from slm_core.engine.prefixes import LEAST_SHARED, NO_MATCH, Match, PrefixCache
from slm_core.engine.write_behind import WriteBehind
from slm_core.protocols import Context
from slm_core.types import Capability, EditLevel, Pos


class Sequences:
    """Gives sequences to requests, and keeps those of answered requests until their room is needed.

    Args:
        context: whose sequences they are; nobody else makes or drops any.
        keeps: whether any are kept.

        disk: where kept sequences are written; None for nowhere.

    Attributes:
        shares_forks: whether a fork takes no room of its own.
        can_fork_inside: whether a fork of a part computes nothing.
    """

    def __init__(self, context: Context, *, keeps: bool, disk: WriteBehind | None = None) -> None:
        self._context = context
        self._keeps = keeps
        self._disk = disk
        self._free = list(reversed(range(context.n_seq_max)))
        self.shares_forks = Capability.SHARED_FORK in context.capabilities
        self.can_fork_inside = context.edit_level >= EditLevel.TRUNCATE
        self._kept = PrefixCache(whole=not self.can_fork_inside)

    @property
    def n_kept(self) -> int:
        """Sequences that are kept for prompts that begin alike."""
        return len(self._kept)

    @property
    def n_available(self) -> int:
        """Positions that are free, or would be if kept sequences were dropped; what those share is not counted."""
        return self._context.n_free + sum(self._context.n_exclusive(seq_id) for seq_id in self._kept.seq_ids)

    def match(self, tokens: NDArray[np.int32], salt: str) -> Match:
        """The kept sequence that shares most with ``tokens``."""
        return self._kept.match(tokens, salt) if self._keeps else NO_MATCH

    def take(self, source: Match = NO_MATCH) -> int:
        """A sequence that holds the first ``source.n_shared`` tokens of another one, or none.

        Raises:
            SlmError: the context refuses the fork; no sequence is lost.
        """
        if not self._free and (others := [seq_id for seq_id in self._kept.seq_ids if seq_id != source.seq_id]):
            self._evict(others[0])
        if source.seq_id is None:
            return self._free.pop()
        if self._free and (self.shares_forks or source.seq_id not in self._kept):
            if not self.shares_forks:
                self.make_room(source.n_shared)
            self._context.fork(source.seq_id, self._free[-1], source.n_shared)
            return self._free.pop()
        return self._continued(source.seq_id, source.n_shared)

    def release(self, seq_id: int, salt: str) -> Future[bool] | None:
        """The request of a sequence is answered: keep it for others, where that is of use.

        Returns what tells whether it came to be on disk; None where it is not to be written.
        """
        if not self._keeps or self._context.length(seq_id) < LEAST_SHARED:
            self.drop(seq_id)
            return None
        tokens = np.asarray(self._context.tokens(seq_id), np.int32)
        for covered in self._kept.keep(seq_id, tokens, salt):
            self._forget_on_disk(covered)
            self.drop(covered)
        return None if self._disk is None else self._disk.add(seq_id, tokens, salt)

    def drop(self, seq_id: int) -> None:
        """Nobody needs a sequence any longer."""
        self._context.drop(seq_id)
        self._free.append(seq_id)

    def make_room(self, n_positions: int) -> None:
        """Drop kept sequences, least recently used first, until so many positions are free, or none are kept."""
        while self._context.n_free < n_positions and len(self._kept):
            self._evict(self._kept.seq_ids[0])

    def _evict(self, seq_id: int) -> None:
        self._kept.forget(seq_id)
        self._forget_on_disk(seq_id)
        self.drop(seq_id)

    def _forget_on_disk(self, seq_id: int) -> None:
        if self._disk is not None:
            self._disk.forget(seq_id)

    def _continued(self, seq_id: int, length: int) -> int:
        """A kept sequence itself, cut back: there is no place for a copy, or a copy would take room."""
        self._kept.forget(seq_id)
        self._forget_on_disk(seq_id)
        try:
            if self._context.length(seq_id) > length:
                self._context.truncate(Pos(seq_id, length))
        except BaseException:
            self.drop(seq_id)
            raise
        return seq_id
