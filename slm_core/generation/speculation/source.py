"""A source of tokens that decodes what was drafted along with what is due."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import ConstraintError, InvalidToken, SessionError
from slm_core.generation.events import SpeculationStats
from slm_core.generation.loop import TokenSource
from slm_core.generation.speculation.draft_length import AdaptiveDraftLength
from slm_core.generation.speculation.dumped import MISSING, DumpedSpeculation, MissingDrafter
from slm_core.generation.speculation.model import draw
from slm_core.generation.speculation.proposal import DraftProbabilities, Proposal
from slm_core.generation.speculation.settings import Speculation
from slm_core.generation.token_loop import Progress
from slm_core.protocols import Constraint, FastForward, Forward, Sampler
from slm_core.sampling import SamplerChain
from slm_core.types import EditLevel, PrefillProgress


class Lookahead(TokenSource, Protocol):
    """A history that can be decoded ahead of, such as a session."""

    @property
    def history(self) -> Sequence[int]:
        """The history itself, not to be changed."""
        ...

    @property
    def n_ahead(self) -> int:
        """Tokens that are decoded after the history."""
        ...

    @property
    def knows_next(self) -> bool:
        """Whether the next logits are there without a decode."""
        ...

    @property
    def edit_level(self) -> EditLevel:
        """What can be undone."""
        ...


class SpeculativeSource:
    """A session that is drafted for.

    Args:
        source: the session.
        speculation: how.
        progress: of the answer; no more is drafted than it may still take.
        constraint: what may be said; drafts are cut where they leave it, and go where it leads.
        taken_up: where an answer stands that goes on.
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
        self._source = source
        self._progress = progress
        self._constraint = constraint
        self.speculation = speculation
        self._draft_length = AdaptiveDraftLength(speculation.n_max, adaptive=speculation.adaptive)
        self._queue = deque(() if taken_up is None else taken_up.queue)
        self._in_round = taken_up is not None and taken_up.in_round  # up to the token after the draft
        self._hits: list[bool] = []
        self._before = SpeculationStats() if taken_up is None else taken_up.stats
        self._rounds = self._drafted = self._accepted = 0
        self._draft_s = self._verify_s = 0.0

    @property
    def needs_drafter(self) -> bool:
        """Whether the drafter has to be given again."""
        return isinstance(self.speculation.drafter, MissingDrafter)

    def give(self, speculation: Speculation | None) -> None:
        """Take the drafter that was missing, with its options.

        Raises:
            SessionError: none is given, or none is missing.
        """
        if not self.needs_drafter:
            raise SessionError("a generation is paused that has its drafter: go on without options")
        if speculation is None:
            raise SessionError(MISSING)
        self.speculation = speculation
        self._draft_length = AdaptiveDraftLength(speculation.n_max, adaptive=speculation.adaptive)

    @property
    def queue(self) -> tuple[tuple[int, DraftProbabilities | None], ...]:
        """What is drafted and neither taken nor refused yet, each token with what it was drawn from."""
        return tuple(self._queue)

    def dumped(self) -> DumpedSpeculation:
        """How it drafts, and where it stands."""
        return DumpedSpeculation(self.speculation, self.queue, self.stats, in_round=self._in_round)

    @property
    def stats(self) -> SpeculationStats:
        """What was counted."""
        before, draft_length = self._before, self._draft_length
        return SpeculationStats(
            before.rounds + self._rounds,
            before.drafted + self._drafted,
            before.accepted + self._accepted,
            before.draft_s + self._draft_s,
            before.verify_s + self._verify_s,
            before.switched_off + draft_length.n_switched_off,
            before.switched_on + draft_length.n_switched_on,
            self._reason(),
        )

    # What a generation asks of a source.

    @property
    def n_tokens(self) -> int:
        """Tokens of the history."""
        return self._source.n_tokens

    @property
    def n_pending(self) -> int:
        """Those of them that have yet to be decoded."""
        return self._source.n_pending

    def next_logits(
        self,
        cancelled: Callable[[], bool],
        *,
        expected: Sequence[int] = (),
        progress: PrefillProgress | None = None,
    ) -> NDArray[np.float32] | None:
        """As the session's; where a decode is due, a draft goes with it."""
        if expected and not self._source.knows_next:
            self._queue.clear()
            self._in_round = False
        if expected or self._source.knows_next or self._source.n_pending != 1 or not self._can:
            return self._source.next_logits(cancelled, expected=expected, progress=progress)
        self._end_round()
        if not self._queue and not self._in_round:
            self._draft(cancelled)
        started = time.perf_counter()
        tokens = [token for token, _ in self._queue]
        row = self._source.next_logits(cancelled, expected=tokens, progress=progress)
        if row is not None:
            self._begin_round(time.perf_counter() - started)
        return row

    def take(self, token: int) -> None:
        """As the session's; a draft ends where it said something else."""
        self._source.take(token)
        if not self._queue:
            self._in_round = False
            return
        hit = self._queue.popleft()[0] == token
        self._hits.append(hit)
        self._accepted += hit
        if not hit:
            self._queue.clear()
            self._in_round = False

    def settle(self) -> None:
        """As the session's."""
        self._source.settle()

    def choose(self, sampler: Sampler, logits: NDArray[np.float32]) -> int:
        """The next token: a draw, in which a token that was drawn for the draft has its chance first."""
        token, draft_probabilities = self._queue[0] if self._queue else (0, None)
        if draft_probabilities is None or not isinstance(sampler, SamplerChain):
            return sampler.sample(logits)
        return accept_or_draw(sampler, logits, token, draft_probabilities)

    # Rounds.

    @property
    def _can(self) -> bool:
        return self._source.edit_level >= EditLevel.TRUNCATE

    def _reason(self) -> str:
        if not self._can:
            return f"off: the context cannot take a wrong guess back (edit level {self._source.edit_level.name})"
        return (
            ""
            if self._draft_length.on
            else f"off: {self._draft_length.acceptance:.0%} of what is drafted is right, which does not pay"
        )

    def _draft(self, cancelled: Callable[[], bool]) -> None:
        n = self._draft_length.length()
        n = n if self._progress.n_left is None else min(n, self._progress.n_left - 1)
        if n < 1:
            return
        started = time.perf_counter()
        proposal = self._proposed(n, cancelled)
        seconds = time.perf_counter() - started
        self._queue.extend(proposal)
        self._draft_s += seconds
        if self._queue:
            self._draft_length.drafted(len(self._queue), seconds)

    def _proposed(self, n: int, cancelled: Callable[[], bool]) -> list[tuple[int, DraftProbabilities | None]]:
        proposal = self.speculation.drafter.draft(self._source.history, n, cancelled)
        pairs = (
            _with_draft_probabilities(proposal) if self._constraint is None else _allowed(proposal, self._constraint)
        )
        return list(islice(pairs, n))

    def _begin_round(self, seconds: float) -> None:
        """A decode was made: what did not fit into it was not drafted."""
        n = self._source.n_ahead
        while len(self._queue) > n:
            self._queue.pop()
        self._in_round = True
        self._draft_length.decoded(n + 1, seconds)
        if n:
            self._rounds += 1
            self._drafted += n
            self._verify_s += seconds

    def _end_round(self) -> None:
        self._draft_length.verified(self._hits)
        self._hits.clear()


def accept_or_draw(
    chain: SamplerChain, logits: NDArray[np.float32], token: int, draft_probabilities: DraftProbabilities
) -> int:
    """Accept a drafted token, or draw another, such that the result has the distribution of the chain.

    With p of the chain and q the draft probabilities, the token is taken with probability min(1, p / q); else one
    is drawn in proportion to max(0, p - q). The result has exactly the distribution p (Leviathan et al. 2023, arXiv
    2211.17192; Chen et al. 2023, arXiv 2302.01318).

    Args:
        chain: gives p and random numbers.
        logits: one row, float32 [V].
        token: drawn from ``draft_probabilities``.
        draft_probabilities: q.
    """
    ids, p = chain.distribution(logits)
    q = _looked_up(draft_probabilities, ids)
    here = ids == token
    if chain.uniform() * _looked_up(draft_probabilities, np.array([token]))[0] < p[here].sum():
        return token
    rest = np.maximum(p - q, 0.0)
    return draw(ids, rest if rest.any() else p, chain.uniform())


def _looked_up(draft_probabilities: DraftProbabilities, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """The probability of each of ``ids``, float64 [n]."""
    known, probabilities = draft_probabilities
    order = np.argsort(known)
    places = np.searchsorted(known, ids, sorter=order).clip(max=len(known) - 1)
    found = order[places]
    return np.where(known[found] == ids, probabilities[found], 0.0)


def _with_draft_probabilities(proposal: Proposal) -> Iterator[tuple[int, DraftProbabilities | None]]:
    draft_probabilities: Sequence[DraftProbabilities | None] = proposal.draft_probabilities or [None] * len(
        proposal.tokens
    )
    return zip(proposal.tokens, draft_probabilities, strict=True)


def _allowed(proposal: Proposal, constraint: Constraint) -> Iterator[tuple[int, DraftProbabilities | None]]:
    """The tokens up to the first that may not be said, or up to where others are forced: then those.

    One that was drawn stays, as its refusal is what keeps the distribution: what is drawn then is no plain draw.
    """
    ahead = constraint.clone()
    for token, draft_probabilities in _with_draft_probabilities(proposal):
        try:
            moved = ahead.advance(token)
        except (InvalidToken, ConstraintError):
            if draft_probabilities is not None:
                yield token, draft_probabilities
            return
        yield token, draft_probabilities
        if isinstance(moved, FastForward):
            yield from ((forced, None) for forced in moved.tokens)
        if not isinstance(moved, Forward):
            return
