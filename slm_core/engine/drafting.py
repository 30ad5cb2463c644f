"""Speculative decoding in an engine: how many tokens each request drafts in a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from slm_core.engine.costs import StepCosts, attended
from slm_core.engine.plan import ActiveRequest
from slm_core.errors import InvalidOption, InvalidToken
from slm_core.generation.speculation import (
    DraftModel,
    DraftRounds,
    PromptLookup,
    Speculation,
    SuffixIndex,
    TranslatedDraftModel,
    in_sequence,
)
from slm_core.generation.token_loop import Progress, TokenHistory
from slm_core.protocols import Constraint, Context
from slm_core.types import EditLevel

if TYPE_CHECKING:
    from slm_core.engine.requests import Request

_ACCEPTED = "accepted by an engine: PromptLookup, 'mtp', DraftFunction, or a drafter class of your own"


class StepShare:
    """The cost of one request's draft rounds: the time of the whole step, which also decodes other requests.

    Attributes:
        has_single: whether the time of a step without drafts is known.
        n_others: expected number of tokens that other requests get from the step.
        varies: True, because other requests start and end.
    """

    def __init__(self) -> None:
        self.has_single = False
        self.n_others = 0.0
        self.varies = True
        self._seconds: Callable[[int], list[float]] = lambda n_most: [0.0] * n_most

    def begin(self, n_others: float, seconds: Callable[[int], list[float]], *, has_single: bool) -> None:
        """Start planning a step.

        Args:
            n_others: expected number of tokens that other requests get from it.
            has_single: whether the time of a step without drafts is known.
            seconds: maps n to the seconds of steps with 1 to n tokens of this request, without steps that are too
                long.
        """
        self.n_others = n_others
        self.has_single = has_single
        self._seconds = seconds

    def expected(self, n_most: int) -> list[float]:
        """Seconds of steps with 1 to ``n_most`` tokens of this request, without the steps that are too long."""
        return self._seconds(n_most)

    def measured(self, n_tokens: int, seconds: float) -> None:
        """Nothing to do: the engine measures steps as a whole."""


class RequestDrafts(DraftRounds):
    """The drafts of a request. They are between its history and the token loop.

    Args:
        history: the tokens of the request.
        speculation: how it drafts; a ``PromptLookup`` is copied, because it indexes one history.
        progress: the progress of the answer.
        constraint: restricts the tokens of the answer; None for no constraint.
        n_vocab: size of the vocabulary.

    Attributes:
        share: the cost of its draft rounds.
        context_level: the edit level of the context.
        drafted_at: the number of the last step that the request drafted for; -1 for none.

    Raises:
        InvalidOption: the drafter cannot draft for many requests.
    """

    def __init__(
        self,
        history: TokenHistory,
        speculation: Speculation,
        progress: Progress,
        constraint: Constraint | None,
        n_vocab: int,
    ) -> None:
        self.share = StepShare()
        self.context_level = EditLevel.TRUNCATE
        super().__init__(_for_one_request(speculation), progress, constraint=constraint, costs=self.share)
        self.drafted_at = -1
        self._history = history
        self._n_vocab = n_vocab

    @property
    def edit_level(self) -> EditLevel:
        """The edit level of the context."""
        return self.context_level

    def propose(self, history: Sequence[int], cancelled: Callable[[], bool]) -> list[int]:
        """Draft tokens after ``history``, and begin a round.

        Raises:
            InvalidToken: the drafter returned an invalid token.
        """
        self.end_round()
        if not self._can_draft:
            return []
        self.draft(history, cancelled)
        tokens = [token for token, _ in self.queue]
        for token in tokens:
            if not isinstance(token, int | np.integer) or not 0 <= token < self._n_vocab:
                raise InvalidToken(
                    f"{token!r:.80} was drafted, which is not a token (accepted: 0 to {self._n_vocab - 1})"
                )
        return tokens

    def follow(self, context: Context, seq_id: int) -> None:
        """Draft for the answer in this sequence, which may be another one after a preemption.

        Raises:
            InvalidOption: the context does not declare ``MTP``, which the drafter needs.
        """
        self.speculation = in_sequence(self.speculation, context, seq_id)

    def decoded(self, n_ahead: int, seconds: float) -> None:
        """Record that a step decoded ``n_ahead`` tokens after the history, from a draft or forced by a constraint."""
        self.begin_round(min(n_ahead, len(self.queue)), seconds)

    def likely(self, n: int) -> float:
        """The expected number of accepted tokens of ``n`` drafted tokens."""
        rate = min(self._draft_length.acceptance, 0.999)
        return rate * (1 - rate**n) / (1 - rate)

    def take(self, token: int) -> None:
        """Add a token to the history."""
        self._history.take(token)
        self.taken(token)

    def settle(self) -> None:
        """Nothing to do: the engine truncates rejected tokens."""


def _for_one_request(speculation: Speculation) -> Speculation:
    """The speculation, with a drafter that works for one of many requests.

    Raises:
        InvalidOption: the drafter cannot draft for many requests.
    """
    drafter = speculation.drafter
    if isinstance(drafter, DraftModel | TranslatedDraftModel):
        raise InvalidOption(f"a draft model would need a context for each request ({_ACCEPTED})")
    if isinstance(drafter, SuffixIndex):
        raise InvalidOption(f"a SuffixIndex follows one history, and an engine has many ({_ACCEPTED})")
    if type(drafter) is PromptLookup:
        return replace(speculation, drafter=PromptLookup(drafter.max_ngram, drafter.min_ngram, drafter.expected))
    return speculation


@dataclass(slots=True)
class _Step:
    """The decoding requests of a step, with the drafts that are already decided.

    Attributes:
        n_tokens: tokens to decode.
        n_attended: positions that these tokens attend to.
        n_likely: expected number of tokens that answers get.
        has_plain: whether the time of the step without drafts is known.
        most_s: the longest step that drafts may cause, in seconds.
    """

    n_tokens: int
    n_attended: int
    n_likely: float
    has_single: bool
    most_s: float = math.inf


class StepDrafts:
    """Chooses the drafts of each step.

    A draft makes the step longer, and gives its request more tokens. It pays if all decoding requests together get
    more tokens per second. Requests draft one after the other, the least recent drafter first. Each request counts the
    drafts before it as part of the step.

    Drafts never make a step of several requests longer than ``step_s``, and leave prompts half of the time that remains
    without drafts.

    Args:
        context: the context of the engine.
        costs: estimates the time of steps.
        step_s: seconds that a step of several requests may take.
        contained: exceptions of drafters that end only their own request; see ``core.EngineCore``.
    """

    def __init__(
        self, context: Context, costs: StepCosts, step_s: float, contained: type[BaseException] = Exception
    ) -> None:
        self._context = context
        self._costs = costs
        self._step_s = step_s
        self._contained = contained
        self._n_steps = 0

    def draft(
        self, requests: Mapping[int, Request], states: Sequence[ActiveRequest]
    ) -> tuple[list[ActiveRequest], dict[int, BaseException]]:
        """Set the tokens that requests may decode ahead of their histories: forced tokens, or drafts.

        Args:
            requests: the requests by number.
            states: the state of each request.

        Returns:
            The states with ``n_ahead``, and by number the errors of failed requests.
        """
        decoding = [state for state in states if state.decoding]
        n_tokens = sum(state.n_pending for state in decoding)
        n_attended = sum(attended(state.n_held, state.n_pending) for state in decoding)
        step = _Step(n_tokens, n_attended, len(decoding), has_single=self._costs.has_measured(n_tokens))
        if len(states) > 1:
            step.most_s = self._most_s(step, has_prompts=len(decoding) < len(states))
        self._n_steps += 1
        failed: dict[int, BaseException] = {}
        for state in sorted(states, key=lambda state: _drafted_at(requests[state.id])):
            request = requests[state.id]
            try:
                request.ahead = self._ahead(request, state, step)
            except self._contained as error:  # an error of a drafter or constraint concerns only its request
                failed[state.id] = error
        remaining = [state for state in states if state.id not in failed]
        return [replace(state, n_ahead=len(requests[state.id].ahead)) for state in remaining], failed

    def _ahead(self, request: Request, state: ActiveRequest, step: _Step) -> Sequence[int]:
        if request.drafts is not None:
            request.drafts.context_level = self._context.edit_level
            request.drafts.forget()
        if not state.decoding:
            return ()
        ahead, n_likely = request.loop.expected, 0.0
        if request.drafts is not None and not ahead and state.n_pending == 1:
            assert request.seq_id is not None, "an active request has a sequence"
            request.drafts.follow(self._context, request.seq_id)
            request.drafts.share.begin(
                step.n_likely - 1, lambda n_most: self._seconds(state, step, n_most), has_single=step.has_single
            )
            ahead = request.drafts.propose(request.history.tokens, lambda: request.loop.interrupted)
            if ahead:
                request.drafts.drafted_at, n_likely = self._n_steps, request.drafts.likely(len(ahead))
        step.n_tokens += len(ahead)
        step.n_attended += attended(state.n_held + state.n_pending, len(ahead))
        step.n_likely += n_likely
        return ahead

    def _most_s(self, step: _Step, *, has_prompts: bool) -> float:
        without_drafts_s = self._costs.seconds(step.n_tokens, step.n_attended)
        return self._step_s if without_drafts_s is None or not has_prompts else (without_drafts_s + self._step_s) / 2

    def _seconds(self, state: ActiveRequest, step: _Step, n_most: int) -> list[float]:
        """Seconds of the step with 1 to ``n_most`` tokens of a request; ``step`` already counts one of them."""
        single_s, *more = self._costs.growing(step.n_tokens, step.n_attended, state.n_held + 1, n_most)
        return [single_s, *takewhile(lambda seconds: seconds <= step.most_s, more)]


def _drafted_at(request: Request) -> int:
    return -1 if request.drafts is None else request.drafts.drafted_at
