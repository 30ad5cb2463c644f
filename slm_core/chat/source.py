"""The history of a session for its generations: its tokens, and the part that the context has decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from slm_core.chat.decoded import DecodedSequence
from slm_core.chat.marks import Marks
from slm_core.context_queue import queue_of
from slm_core.errors import SessionError
from slm_core.generation.top import Row
from slm_core.protocols import Context
from slm_core.types import Capability, EditLevel, Pos, PrefillProgress


class SessionSource:
    """The history of a session, as generations, drafters and shifts need it; see ``loop.TokenSource``.

    Args:
        context: the KV cache.
        seq_id: the session's sequence.

    Attributes:
        tokens: the history.
        decoded: the decoded part of it, and tokens decoded ahead.
        marks: marks in the history.
        closed: whether the session is closed.
    """

    def __init__(self, context: Context, seq_id: int) -> None:
        self._context = context
        self._seq_id = seq_id
        self.tokens: list[int] = []
        self.decoded = DecodedSequence(context, seq_id)
        self.marks = Marks()
        self.closed = False

    @property
    def n_tokens(self) -> int:
        """Tokens of the history."""
        return len(self.tokens)

    @property
    def n_pending(self) -> int:
        """Tokens of the history that are not decoded yet."""
        return len(self.tokens) - self.decoded.n_held

    @property
    def history(self) -> Sequence[int]:
        """The tokens; not a copy."""
        return self.tokens

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
        return self.decoded.next_row(self.tokens, cancelled, expected, progress)

    def next_top(self, k: int, cancelled: Callable[[], bool], *, progress: PrefillProgress | None = None) -> Row | None:
        """See ``top.TopSource``.

        Raises:
            UnsupportedOutput: the context does not declare ``DEVICE_SAMPLING``.
        """
        self._check_continuable()
        return self.decoded.next_top(self.tokens, k, cancelled, progress)

    def take(self, token: int) -> None:
        """Add a chosen token."""
        self.decoded.take(token)
        self.tokens.append(token)

    def settle(self) -> None:
        """Remove tokens that were decoded ahead of the history."""
        self.decoded.settle()

    def shift_out(self, start: int, end: int) -> EditLevel:
        """Remove [start, end) of the history during an answer, which continues."""
        self.check_open()
        self.settle()
        return self.take_out(start, end)

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
            self.tokens = self.tokens[:start] + self.tokens[end:]
            self.decoded.keep(None)
            self.marks.remove(start, end)
        return min(level, EditLevel.TRUNCATE) if exact else level

    def check_open(self) -> None:
        """Raise ``SessionError`` if the session is closed."""
        if self.closed:
            raise SessionError("the session is closed")

    def _check_continuable(self) -> None:
        self.check_open()
        if not self.tokens:
            raise SessionError("there is nothing to continue: append text first")
