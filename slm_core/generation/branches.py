"""Forks of one sequence that are decoded together, for beam search and completions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slm_core.context_queue import queue_of
from slm_core.errors import ContextClosed, ContextFull
from slm_core.protocols import Context
from slm_core.types import Pos


class Branches:
    """Branches in a context. They use only ``fork``, ``drop`` and ``decode``, so any edit level is enough.

    Args:
        context: the KV cache.
        base: the sequence to fork, and the length of the fork.
        seq_ids: empty sequences that no other code uses.
    """

    def __init__(self, context: Context, base: Pos, seq_ids: Sequence[int]) -> None:
        self._context = context
        self._queue = queue_of(context)
        self.base = base
        self._free = list(reversed(seq_ids))
        self._taken: set[int] = set()

    @property
    def taken(self) -> frozenset[int]:
        """The sequences of branches."""
        return frozenset(self._taken)

    def length(self, seq_id: int) -> int:
        """The number of tokens of a branch."""
        return self._context.length(seq_id)

    def fork(self, src: int) -> int:
        """Fork a branch, or the base; returns the sequence of the fork.

        Raises:
            ContextFull: storage is not shared, and there is no room for the copy; nothing changed.
        """
        seq_id = self._free[-1]
        with self._queue:
            self._context.fork(src, seq_id, self.base.index if src == self.base.seq_id else None)
        self._taken.add(self._free.pop())
        return seq_id

    def drop(self, seq_id: int) -> None:
        """Drop a branch."""
        with self._queue:
            self._context.drop(seq_id)
        self._taken.remove(seq_id)
        self._free.append(seq_id)

    def decode(self, runs: Sequence[tuple[int, Sequence[int]]]) -> NDArray[np.float32]:
        """Decode more tokens of several branches, in as few batches as ``n_batch`` allows.

        Args:
            runs: distinct sequences, and the next tokens of each, at least one.

        Returns:
            The row after the last token of each run, float32 [n_runs, V]; a copy.

        Raises:
            ContextFull: there is no room for all tokens; nothing changed.
        """
        with self._queue:
            return self._decode(runs)

    def _decode(self, runs: Sequence[tuple[int, Sequence[int]]]) -> NDArray[np.float32]:
        needed = sum(len(tokens) for _, tokens in runs)
        if needed > self._context.n_free:
            raise ContextFull(needed, self._context.n_free)
        batch, rows = self._context.new_batch(), []
        for seq_id, tokens in runs:
            start = self._context.length(seq_id)
            for i, token in enumerate(tokens):
                if len(batch) == batch.capacity:
                    rows.append(self._context.decode(batch).copy())
                    batch.clear()
                batch.add(token, Pos(seq_id, start + i), logits=i == len(tokens) - 1)
        rows.append(self._context.decode(batch).copy())
        return np.concatenate(rows)

    def close(self) -> None:
        """Drop all branches. A second call does nothing."""
        with contextlib.suppress(ContextClosed):
            for seq_id in sorted(self._taken):
                self.drop(seq_id)
