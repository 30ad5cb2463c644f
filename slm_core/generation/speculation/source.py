"""A token source that decodes drafts in the same batch as pending tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slm_core.generation.loop import TokenSource
from slm_core.generation.speculation.dumped import DumpedSpeculation
from slm_core.generation.speculation.rounds import DraftRounds
from slm_core.generation.speculation.settings import Speculation
from slm_core.generation.token_loop import Progress
from slm_core.protocols import Constraint
from slm_core.types import EditLevel, PrefillProgress


class Lookahead(TokenSource, Protocol):
    """A token source that can decode tokens ahead of its history, such as a session."""

    @property
    def history(self) -> Sequence[int]:
        """The history itself; the caller must not change it."""
        ...

    @property
    def n_ahead(self) -> int:
        """The number of tokens decoded after the history."""
        ...

    @property
    def knows_next(self) -> bool:
        """Whether the next logits are known without a decode."""
        ...

    @property
    def edit_level(self) -> EditLevel:
        """The edit level of the context."""
        ...


class SpeculativeSource(DraftRounds):
    """A session with speculative decoding.

    Args:
        source: the session.
        speculation: how it drafts.
        progress: the progress of the answer; drafts do not exceed the tokens left.
        constraint: restricts the answer; drafts end at the first token that it excludes, or at forced tokens.
        taken_up: the state of a resumed answer.
    """

    def __init__(
        self,
        source: Lookahead,
        speculation: Speculation,
        progress: Progress,
        *,
        constraint: Constraint | None = None,
        taken_up: DumpedSpeculation | None = None,
    ) -> None:
        super().__init__(speculation, progress, constraint=constraint, taken_up=taken_up)
        self._source = source

    @property
    def edit_level(self) -> EditLevel:
        """The edit level of the context."""
        return self._source.edit_level

    @property
    def n_tokens(self) -> int:
        """Tokens of the history."""
        return self._source.n_tokens

    @property
    def n_pending(self) -> int:
        """Tokens of the history that are not decoded yet."""
        return self._source.n_pending

    def next_logits(
        self,
        cancelled: Callable[[], bool],
        *,
        expected: Sequence[int] = (),
        progress: PrefillProgress | None = None,
    ) -> NDArray[np.float32] | None:
        """The session's next logits; if they need a decode, the batch includes a draft."""
        if expected and not self._source.knows_next:
            self.forget()
        if expected or self._source.knows_next or self._source.n_pending != 1 or not self._can_draft:
            return self._source.next_logits(cancelled, expected=expected, progress=progress)
        self.end_round()
        if not self._queue and not self._in_round:
            self.draft(self._source.history, cancelled)
        started = time.perf_counter()
        tokens = [token for token, _ in self._queue]
        row = self._source.next_logits(cancelled, expected=tokens, progress=progress)
        if row is not None:
            self.begin_round(self._source.n_ahead, time.perf_counter() - started)
        return row

    def take(self, token: int) -> None:
        """Add a token to the history; the draft ends if its next token differs."""
        self._source.take(token)
        self.taken(token)

    def settle(self) -> None:
        """Forget tokens that were decoded ahead of the history."""
        self._source.settle()
