"""The history of a session for its generations: its inputs, and the part that the context has decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from slm_core.chat.decoded import DecodedSequence
from slm_core.chat.guard import Guard
from slm_core.chat.marks import Marks
from slm_core.context.inputs import Held, ahead_of, block_boundary, has_records, text_tokens
from slm_core.context_queue import queue_of
from slm_core.errors import InvalidOption, SessionError
from slm_core.generation.speculation import in_sequence
from slm_core.generation.speculation.dumped import DumpedSpeculation, MissingDrafter
from slm_core.generation.top import Row
from slm_core.generation.trained import TrainedLength
from slm_core.interrupts import uninterrupted
from slm_core.protocols import Context
from slm_core.types import Capability, EditLevel, Pos, PrefillProgress


class SessionSource:
    """The history of a session, as generations, drafters and shifts need it; see ``loop.TokenSource``.

    Args:
        context: the KV cache.
        seq_id: the session's sequence.
        trained: warns of a history that is too long.

    Attributes:
        decoded: the decoded part of it, and tokens decoded ahead.
        marks: marks in the history.
        closed: whether the session is closed.
        guard: keeps a second thread out of the session.
    """

    def __init__(self, context: Context, seq_id: int, trained: TrainedLength) -> None:
        self._context = context
        self.trained = trained
        self._seq_id = seq_id
        self._inputs: list[Held] = []
        self._has_records = False
        self.decoded = DecodedSequence(context, seq_id)
        self.marks = Marks()
        self.closed = False
        self.guard = Guard("session", SessionError)

    @property
    def inputs(self) -> list[Held]:
        """The history: token ids, and records of embedding rows and of tokens in bidirectional blocks; not a copy."""
        return self._inputs

    @inputs.setter
    def inputs(self, inputs: list[Held]) -> None:
        self._inputs, self._has_records = inputs, has_records(inputs)

    @property
    def n_tokens(self) -> int:
        """Tokens and embedding rows of the history."""
        return len(self.inputs)

    @property
    def n_pending(self) -> int:
        """Tokens of the history that are not decoded yet."""
        return len(self.inputs) - self.decoded.n_held

    @property
    def history(self) -> Sequence[int]:
        """The tokens without embedding rows; not a copy if there are no rows."""
        return text_tokens(self._inputs) if self._has_records else cast("list[int]", self._inputs)

    @property
    def n_ahead(self) -> int:
        """The number of tokens decoded after the history."""
        return self.decoded.n_ahead

    @property
    def knows_next(self) -> bool:
        """Whether ``next_logits`` has nothing to decode."""
        return self.decoded.row is not None

    @property
    def edit_level(self) -> EditLevel:
        """The edit level of the context."""
        return self._context.edit_level

    def dumped_speculation(self, dumped: DumpedSpeculation) -> DumpedSpeculation:
        """The speculation of a resumed answer; without its drafter if the context cannot draft as it did."""
        speculation = dumped.speculation
        try:
            return replace(dumped, speculation=in_sequence(speculation, self._context, self._seq_id))
        except InvalidOption:
            return replace(dumped, speculation=replace(speculation, drafter=MissingDrafter()))

    @property
    def picks_top(self) -> bool:
        """Whether the context computes the top-k, so that ``next_top`` works."""
        return Capability.DEVICE_SAMPLING in self._context.capabilities

    def next_logits(
        self,
        cancelled: Callable[[], bool],
        *,
        expected: Sequence[int] = (),
        progress: PrefillProgress | None = None,
    ) -> NDArray[np.float32] | None:
        """See ``Session.next_logits``."""
        self._check_continuable()
        self.trained.check(self.n_tokens)
        return self.decoded.next_row(self.inputs, cancelled, expected, progress)

    def next_top(self, k: int, cancelled: Callable[[], bool], *, progress: PrefillProgress | None = None) -> Row | None:
        """See ``top.TopSource``.

        Raises:
            UnsupportedOutput: the context does not declare ``DEVICE_SAMPLING``.
        """
        self._check_continuable()
        self.trained.check(self.n_tokens)
        return self.decoded.next_top(self.inputs, k, cancelled, progress)

    @uninterrupted
    def take(self, token: int) -> None:
        """Add a chosen token."""
        self.decoded.take(token)
        self.inputs.append(token)

    def settle(self) -> None:
        """Remove tokens that were decoded ahead of the history."""
        self.decoded.settle()

    def whole_blocks(self, start: int, end: int) -> tuple[int, int]:
        """The range without the ends that divide a bidirectional block; it may be empty."""
        first, last = block_boundary(self.inputs, start), block_boundary(self.inputs, end)
        if first < start:
            first = start + ahead_of(self.inputs[start]) + 1
        return first, max(first, last)

    def check_boundary(self, index: int) -> None:
        """Raise ``SessionError`` if a split at ``index`` would divide a bidirectional block."""
        start = block_boundary(self.inputs, index)
        if start < index:
            raise SessionError(
                f"position {index} is in a bidirectional block (accepted: {start}, where it begins, or a position after"
                " the block)"
            )

    def shift_out(self, start: int, end: int) -> EditLevel:
        """Remove [start, end) of the history during an answer, which continues."""
        self.check_open()
        self.settle()
        return self.take_out(start, end)

    @uninterrupted
    def take_out(self, start: int, end: int, *, exact: bool = False) -> EditLevel:
        """Remove [start, end) of the history, with nothing decoded ahead; see ``Session.remove``."""
        level, n_held = self._context.edit_level, self.decoded.n_held
        if start < min(end, n_held):
            if level is EditLevel.CUT and not exact:
                with queue_of(self._context):
                    self._context.cut(Pos(self._seq_id, start), Pos(self._seq_id, min(end, n_held)))
            else:
                level = min(level, EditLevel.TRUNCATE)
                self.decoded.forget_from(start)
        if start < end:
            self.inputs = self.inputs[:start] + self.inputs[end:]
            self.decoded.keep(None)
            self.marks.remove(start, end)
        return min(level, EditLevel.TRUNCATE) if exact else level

    def check_open(self) -> None:
        """Raise ``SessionError`` if the session is closed."""
        if self.closed:
            raise SessionError("the session is closed")

    def _check_continuable(self) -> None:
        self.check_open()
        if not self.inputs:
            raise SessionError("there is nothing to continue: append text first")
