"""Rounds of speculative decoding: drafts, accepted tokens, and statistics."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import ConstraintError, InvalidToken, SessionError
from slm_core.generation.events import SpeculationStats
from slm_core.generation.speculation.draft_length import AdaptiveDraftLength, RoundCosts
from slm_core.generation.speculation.dumped import MISSING, DumpedSpeculation, MissingDrafter
from slm_core.generation.speculation.model import draw
from slm_core.generation.speculation.proposal import DraftProbabilities, Proposal
from slm_core.generation.speculation.settings import Speculation
from slm_core.generation.token_loop import Progress
from slm_core.protocols import Constraint, FastForward, Forward, Sampler
from slm_core.sampling import SamplerChain
from slm_core.types import EditLevel


class DraftRounds(ABC):
    """The drafts of an answer, round by round: ``draft``, decode it, ``begin_round``, then ``taken`` with each token.

    Args:
        speculation: how it drafts.
        progress: the progress of the answer; drafts do not exceed the tokens left.
        constraint: restricts the answer; drafts end at the first token that it excludes, or at forced tokens.
        costs: the cost of rounds; None to measure it.
        taken_up: the state of a resumed answer.
    """

    def __init__(
        self,
        speculation: Speculation,
        progress: Progress,
        *,
        constraint: Constraint | None = None,
        costs: RoundCosts | None = None,
        taken_up: DumpedSpeculation | None = None,
    ) -> None:
        self._progress = progress
        self._constraint = constraint
        self.speculation = speculation
        self._costs = costs
        self._draft_length = AdaptiveDraftLength(speculation.n_max, adaptive=speculation.adaptive, costs=costs)
        self._queue = deque(() if taken_up is None else taken_up.queue)
        self._in_round = taken_up is not None and taken_up.in_round  # up to the token after the draft
        self._compared: deque[int] = deque()  # drafted while drafting is off, not decoded
        self._hits: list[bool] = []
        self._before = SpeculationStats() if taken_up is None else taken_up.stats
        self._rounds = self._drafted = self._accepted = 0
        self._draft_s = self._verify_s = 0.0

    @property
    @abstractmethod
    def edit_level(self) -> EditLevel:
        """The edit level of the context."""

    @property
    def needs_drafter(self) -> bool:
        """Whether the caller has to set the drafter again."""
        return isinstance(self.speculation.drafter, MissingDrafter)

    def give(self, speculation: Speculation | None) -> None:
        """Set a missing drafter, with its options.

        Raises:
            SessionError: ``speculation`` is None, or no drafter is missing.
        """
        if not self.needs_drafter:
            raise SessionError(
                "a generation with its own drafter is paused: call generate() without options to continue it"
            )
        if speculation is None:
            raise SessionError(MISSING)
        self.speculation = speculation
        self._draft_length = AdaptiveDraftLength(speculation.n_max, adaptive=speculation.adaptive, costs=self._costs)

    @property
    def queue(self) -> tuple[tuple[int, DraftProbabilities | None], ...]:
        """Drafted tokens that are neither accepted nor rejected yet, each with its draft probabilities."""
        return tuple(self._queue)

    def dumped(self) -> DumpedSpeculation:
        """The speculation and its state, for a dump."""
        return DumpedSpeculation(self.speculation, self.queue, self.stats, in_round=self._in_round)

    @property
    def stats(self) -> SpeculationStats:
        """The statistics."""
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

    def draft(self, history: Sequence[int], cancelled: Callable[[], bool]) -> None:
        """Draft tokens after ``history``, unless a draft does not pay or the answer is near its end."""
        n = self._draft_length.length()
        if n:
            self._compared.clear()
            n = n if self._progress.n_left is None else min(n, self._progress.n_left - 1)
            self._queue.extend(self._timed(history, n, cancelled))
        elif not self._compared:
            n = self._draft_length.n_compared
            self._compared.extend(token for token, _ in self._timed(history, n, cancelled))

    def _timed(
        self, history: Sequence[int], n: int, cancelled: Callable[[], bool]
    ) -> list[tuple[int, DraftProbabilities | None]]:
        if n < 1:
            return []
        started = time.perf_counter()
        proposal = self._proposed(history, n, cancelled)
        seconds = time.perf_counter() - started
        self._draft_s += seconds
        if proposal:
            self._draft_length.drafted(len(proposal), seconds)
        return proposal

    def forget(self) -> None:
        """Discard the draft."""
        self._queue.clear()
        self._in_round = False

    def begin_round(self, n: int, seconds: float) -> None:
        """Record that ``n`` tokens of the draft were decoded; the other tokens of the draft are discarded."""
        while len(self._queue) > n:
            self._queue.pop()
        self._in_round = True
        self._draft_length.decoded(n + 1, seconds)
        if n:
            self._rounds += 1
            self._drafted += n
            self._verify_s += seconds

    def end_round(self) -> None:
        """Update the draft length with the accepted tokens of the last draft."""
        self._draft_length.verified(self._hits)
        self._hits.clear()

    def taken(self, token: int) -> None:
        """Record a chosen token; the draft ends if its next token differs."""
        if not self._queue:
            self._in_round = False
            self._compare(token)
            return
        hit = self._queue.popleft()[0] == token
        self._hits.append(hit)
        self._accepted += hit
        if not hit:
            self.forget()

    def _compare(self, token: int) -> None:
        """Update the acceptance with a draft that was not decoded."""
        if not self._compared:
            return
        hit = self._compared.popleft() == token
        if not hit:
            self._compared.clear()
        self._draft_length.verified([hit])

    def choose(self, sampler: Sampler, logits: NDArray[np.float32]) -> int:
        """Sample the next token; a token of a sampled draft is accepted or rejected first."""
        token, draft_probabilities = self._queue[0] if self._queue else (0, None)
        if draft_probabilities is None or not isinstance(sampler, SamplerChain):
            return sampler.sample(logits)
        return accept_or_draw(sampler, logits, token, draft_probabilities)

    @property
    def _can_draft(self) -> bool:
        return self.edit_level >= EditLevel.TRUNCATE

    def _reason(self) -> str:
        if not self._can_draft:
            return f"off: the context cannot take a wrong guess back (edit level {self.edit_level.name})"
        return (
            ""
            if self._draft_length.on
            else f"off: {self._draft_length.acceptance:.0%} of what is drafted is right, which does not pay"
        )

    def _proposed(
        self, history: Sequence[int], n: int, cancelled: Callable[[], bool]
    ) -> list[tuple[int, DraftProbabilities | None]]:
        proposal = self.speculation.drafter.draft(history, n, cancelled)
        pairs = (
            _with_draft_probabilities(proposal) if self._constraint is None else _allowed(proposal, self._constraint)
        )
        return list(islice(pairs, n))


def accept_or_draw(
    chain: SamplerChain, logits: NDArray[np.float32], token: int, draft_probabilities: DraftProbabilities
) -> int:
    """Accept a drafted token or draw another one, so that the result has the distribution of the chain.

    Let p be the distribution of the chain, and q the draft probabilities. The token is accepted with probability
    min(1, p / q); otherwise a token is drawn in proportion to max(0, p - q). The result has exactly the distribution p
    (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

    Args:
        chain: computes p and random numbers.
        logits: one row, float32 [V].
        token: a token drawn from ``draft_probabilities``.
        draft_probabilities: q.
    """
    ids, p = chain.distribution(logits)
    q = _looked_up(draft_probabilities, ids)
    is_token = ids == token
    if chain.uniform() * _looked_up(draft_probabilities, np.array([token]))[0] < p[is_token].sum():
        return token
    residual = np.maximum(p - q, 0.0)
    return draw(ids, residual if residual.any() else p, chain.uniform())


def _looked_up(draft_probabilities: DraftProbabilities, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """The probability of each of ``ids``, float64 [n]."""
    draft_ids, probabilities = draft_probabilities
    order = np.argsort(draft_ids)
    offsets = np.searchsorted(draft_ids, ids, sorter=order).clip(max=len(draft_ids) - 1)
    indices = order[offsets]
    return np.where(draft_ids[indices] == ids, probabilities[indices], 0.0)


def _with_draft_probabilities(proposal: Proposal) -> Iterator[tuple[int, DraftProbabilities | None]]:
    draft_probabilities: Sequence[DraftProbabilities | None] = proposal.draft_probabilities or [None] * len(
        proposal.tokens
    )
    return zip(proposal.tokens, draft_probabilities, strict=True)


def _allowed(proposal: Proposal, constraint: Constraint) -> Iterator[tuple[int, DraftProbabilities | None]]:
    """The tokens before the first one that the constraint excludes; forced tokens end the draft.

    A sampled token stays although the constraint excludes it, because its rejection is part of the exact distribution.
    """
    ahead = constraint.clone()
    for token, draft_probabilities in _with_draft_probabilities(proposal):
        try:
            outcome = ahead.advance(token)
        except (InvalidToken, ConstraintError):
            if draft_probabilities is not None:
                yield token, draft_probabilities
            return
        yield token, draft_probabilities
        if isinstance(outcome, FastForward):
            yield from ((forced, None) for forced in outcome.tokens)
        if not isinstance(outcome, Forward):
            return
