"""Copies of one sequence that grow apart and are decoded together: what beams and completions are made of."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import ContextClosed, ContextFull
from slm_core.protocols import Context
from slm_core.types import Pos


class Branches:
    """Some sequences of a context, used by ``fork``, ``drop`` and ``decode`` only; so any edit level will do.

    Args:
        context: the KV cache.
        base: what they branch off from: a sequence, and how much of it.
        seq_ids: empty sequences that nobody else uses.
    """

    def __init__(self, context: Context, base: Pos, seq_ids: Sequence[int]) -> None:
        self._context = context
        self.base = base
        self._free = list(reversed(seq_ids))
        self._taken: set[int] = set()

    @property
    def taken(self) -> frozenset[int]:
        """The sequences that hold a branch."""
        return frozenset(self._taken)

    def length(self, seq_id: int) -> int:
        """Tokens that a branch holds."""
        return self._context.length(seq_id)

    def fork(self, src: int) -> int:
        """A copy of a branch, or of the base; returns where it is.

        Raises:
            ContextFull: storage is not shared and there is no room for the copy; nothing changed.
        """
        seq_id = self._free[-1]
        self._context.fork(src, seq_id, self.base.index if src == self.base.seq_id else None)
        self._taken.add(self._free.pop())
        return seq_id

    def drop(self, seq_id: int) -> None:
        """Forget a branch."""
        self._context.drop(seq_id)
        self._taken.remove(seq_id)
        self._free.append(seq_id)

    def decode(self, runs: Sequence[tuple[int, Sequence[int]]]) -> NDArray[np.float32]:
        """Decode further tokens of several branches, as one batch as far as ``n_batch`` allows.

        Args:
            runs: sequences, each once, and the tokens that follow in them, at least one each.

        Returns:
            The row after the last token of each run, float32 [n_runs, V]; the caller's own.

        Raises:
            ContextFull: no room for all; nothing changed.
        """
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
        """Forget all of them. Twice is fine."""
        with contextlib.suppress(ContextClosed):
            for seq_id in sorted(self._taken):
                self.drop(seq_id)
