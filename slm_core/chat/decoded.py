"""The inputs of a session that a context has decoded, in its history and ahead of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from slm_core.context.inputs import Held, add_held, block_boundary
from slm_core.context_queue import queue_of
from slm_core.generation.top import Row, TopRow
from slm_core.interrupts import uninterrupted
from slm_core.protocols import Batch, Context
from slm_core.types import EditLevel, Logits, Pos, PrefillProgress

R = TypeVar("R")
MAX_AHEAD = 64
"""The largest number of tokens decoded ahead: a row of logits is kept for each."""


class DecodedSequence:
    """A sequence of a context: inputs of a history, then optional tokens that are expected to follow it.

    An input is a token, or an embedding row.

    Args:
        context: the KV cache.
        seq_id: the sequence.
    """

    def __init__(self, context: Context, seq_id: int) -> None:
        self.context = context
        self.seq_id = seq_id
        self._queue = queue_of(context)
        self._ahead: deque[int] = deque()
        self._batch: Batch | None = None
        self._rows: deque[NDArray[np.float32]] = deque()  # after the history, and after each token ahead

    @property
    def n_held(self) -> int:
        """Inputs of the history that are decoded."""
        return self.context.length(self.seq_id) - len(self._ahead)

    @property
    def n_ahead(self) -> int:
        """Tokens that are decoded after the history."""
        return len(self._ahead)

    @property
    def row(self) -> NDArray[np.float32] | None:
        """The logits after the history, float32 [V], if they are known."""
        return self._rows[0] if self._rows else None

    def keep(self, row: NDArray[np.float32] | None) -> None:
        """Set the logits after the history; None if they are not known."""
        self._rows = deque() if row is None else deque([row])

    @uninterrupted
    def take(self, token: int) -> None:
        """Add a token to the history: keep the rows ahead if it is the expected token, else drop them."""
        if self._ahead and self._ahead[0] != token:
            self.settle()
        if self._ahead:
            self._ahead.popleft()
            self._rows.popleft()
        else:
            self._rows.clear()

    def settle(self) -> None:
        """Remove the tokens decoded ahead of the history."""
        if self._ahead:
            self.forget_from(self.n_held)

    @uninterrupted
    def forget_from(self, length: int) -> None:
        """Remove decoded inputs from ``length`` on; inputs that are still in the history are decoded again."""
        with self._queue:
            if self.context.edit_level >= EditLevel.TRUNCATE:
                self.context.truncate(Pos(self.seq_id, length))
            else:
                self.context.drop(self.seq_id)
        self._ahead.clear()
        while len(self._rows) > 1:
            self._rows.pop()

    @uninterrupted
    def clear(self) -> None:
        """Remove all tokens."""
        self._ahead.clear()
        self._rows.clear()
        with self._queue:
            self.context.drop(self.seq_id)

    def next_row(
        self,
        inputs: Sequence[Held],
        cancelled: Callable[[], bool],
        expected: Sequence[int] = (),
        progress: PrefillProgress | None = None,
    ) -> NDArray[np.float32] | None:
        """The logits after ``inputs``, float32 [V]. The same batch decodes tokens of ``expected``.

        Args:
            inputs: the history.
            cancelled: called before each batch.
            expected: a draft of the next tokens, which is shortened to fit into the batch and the context.
            progress: called before the first batch and after each.

        Returns:
            The row; None if ``cancelled`` returned True.
        """
        if self._rows:
            return self._rows[0]
        if self.n_held == len(inputs):
            self.forget_from(block_boundary(inputs, len(inputs) - 1))
        self._run(self._copied_rows, inputs, cancelled, expected, progress, keep=self._rows.extend)
        return self.row

    def next_top(
        self, inputs: Sequence[Held], k: int, cancelled: Callable[[], bool], progress: PrefillProgress | None = None
    ) -> Row | None:
        """The ``k`` largest logits after ``inputs``, which are not kept; the whole row, if it is known.

        For the arguments see ``next_row``.
        """
        if self._rows:
            return self._rows[0]
        if self.n_held == len(inputs):
            self.forget_from(block_boundary(inputs, len(inputs) - 1))

        def top_row(batch: Batch) -> TopRow | None:
            top = self.context.decode_top(batch, k)
            if len(top.tokens) == 0:  # not the last batch
                return None
            return TopRow(top.tokens[0].copy(), top.logits[0].copy(), float(top.log_totals[0]))

        return self._run(top_row, inputs, cancelled, (), progress)

    def decode(self, inputs: Sequence[Held], cancelled: Callable[[], bool]) -> Logits | None:
        """Decode the pending inputs; returns a copy of the last row, float32 [1, V]. See ``next_row``."""
        return self._run(self._copied_rows, inputs, cancelled, (), None)

    def _copied_rows(self, batch: Batch) -> Logits:
        return self.context.decode(batch).copy()

    def _run(
        self,
        decode: Callable[[Batch], R],
        inputs: Sequence[Held],
        cancelled: Callable[[], bool],
        expected: Sequence[int],
        progress: PrefillProgress | None,
        keep: Callable[[R], None] | None = None,
    ) -> R | None:
        """Decode the pending inputs; returns the last result of ``decode``, or None if cancelled or without a batch.

        ``keep`` also gets this result. ``decode`` copies its rows: the next call of another thread overwrites them.
        """
        if self._batch is None:
            self._batch = self.context.new_batch()
        batch = self._batch
        rows: R | None = None
        first, length = self.n_held, len(inputs)
        if progress is not None:
            progress(0, length - first)
        while (held := self.n_held) < length:
            if cancelled():
                return None
            chunk = inputs[held : block_boundary(inputs, min(held + batch.capacity, length))]
            last = held + len(chunk) == length
            batch.clear()
            add_held(batch, chunk, Pos(self.seq_id, held), logits="last" if last else "none")
            with uninterrupted:
                with self._queue:
                    ahead = expected[: self._room_beside(len(chunk), batch)] if last and expected else ()
                    if ahead:
                        batch.extend(ahead, Pos(self.seq_id, length), logits="all")
                    rows = decode(batch)
                self._ahead.extend(ahead)
                if last and keep is not None:
                    keep(rows)
            if progress is not None:
                progress(held + len(chunk) - first, length - first)
        return rows

    def _room_beside(self, n: int, batch: Batch) -> int:
        """The largest number of tokens that can be decoded ahead in one batch with ``n`` inputs."""
        return max(0, min(MAX_AHEAD, batch.capacity - n, self.context.n_free - n))
