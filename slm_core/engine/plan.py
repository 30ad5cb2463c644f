"""What the next step computes: a pure function of the requests and the room that there is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from slm_core.engine.costs import attended


@dataclass(frozen=True, slots=True)
class ActiveRequest:
    """A request that has a sequence, as a plan sees it.

    Attributes:
        id: its number.
        n_held: positions of its sequence.
        n_pending: tokens of its history that are yet to be decoded, at least one.
        decoding: whether its answer has begun: it gets its next token in every step.
        n_exclusive: positions that dropping its sequence would free.
        rank: the larger, the longer it is kept; no two requests have the same.
        last_turn: the number of the last step that computed a piece of it; -1 for none.
    """

    id: int
    n_held: int
    n_pending: int
    decoding: bool
    n_exclusive: int
    rank: tuple[float, ...]
    last_turn: int


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request without a sequence, as a plan sees it.

    Attributes:
        id: its number.
        priority: larger ones come first.
        waited_s: seconds since it arrived.
        served: tokens that were computed for its key lately; of equal priorities, the least served key comes first.
        time_left_s: seconds until its timeout; of one key, whoever has least left comes first.
    """

    id: int
    priority: float
    waited_s: float
    served: float
    time_left_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request in a step: the first ``n_tokens`` of those that are pending."""

    id: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step.

    Attributes:
        pieces: what is decoded, each request once.
        preempted: requests that give up their sequences first, to go on later.
        full: a request that the whole context has no room for; None for none.
    """

    pieces: tuple[Piece, ...]
    preempted: tuple[int, ...] = ()
    full: int | None = None


@dataclass(slots=True)
class _Room:
    """Positions and places of a batch that are left while a plan is made."""

    n_free: int
    n_batch: int
    pieces: list[Piece] = field(default_factory=list)

    def take(self, request: ActiveRequest, most: int) -> int:
        n = min(request.n_pending, most, self.n_free, self.n_batch)
        if n > 0:
            self.pieces.append(Piece(request.id, n))
            self.n_free -= n
            self.n_batch -= n
        return max(n, 0)


Affordable = Callable[[int, int, int, int], int]
"""From tokens and attended positions of a step, the depth of a prompt and the most tokens that could be computed of
it, to the number of prompt tokens that fit into the time of a step."""


def plan_step(active: Sequence[ActiveRequest], n_free: int, n_batch: int, affordable: Affordable) -> StepPlan:
    """Plan a step: a token for every decoding request, then pieces of prompts, by turns.

    Where positions run out, the request of the lowest rank gives up its sequence, until the others have room.
    """
    kept, preempted = sorted(active, key=lambda request: request.rank), list[int]()
    while kept:
        decoding = [request for request in kept if request.decoding]
        needed = sum(request.n_pending for request in decoding)
        if needed <= n_free and (decoding or n_free):
            return StepPlan(_pieces(kept, n_free, n_batch, affordable), tuple(preempted))
        if len(kept) == 1:
            return StepPlan((), tuple(preempted), full=kept[0].id)
        victim = kept.pop(0)
        preempted.append(victim.id)
        n_free += victim.n_exclusive
    return StepPlan((), tuple(preempted))


def _pieces(kept: Iterable[ActiveRequest], n_free: int, n_batch: int, affordable: Affordable) -> tuple[Piece, ...]:
    by_turn = sorted(kept, key=lambda request: (request.last_turn, tuple(-part for part in request.rank)))
    room, n_tokens, n_attended = _Room(n_free, n_batch), 0, 0
    for request in by_turn:
        if request.decoding:
            n = room.take(request, request.n_pending)
            n_tokens, n_attended = n_tokens + n, n_attended + attended(request.n_held, n)
    prompts = [request for request in by_turn if not request.decoding]
    budget = room.n_batch
    if n_tokens and prompts and budget:
        budget = affordable(n_tokens, n_attended, prompts[0].n_held, budget)
    for request in prompts:
        budget -= room.take(request, budget)
    return tuple(room.pieces)


def line_up(waiting: Sequence[WaitingRequest], aging_s: float) -> list[int]:
    """The numbers of waiting requests, first in line first.

    By priority and age, then by what their keys were served, then by the time that they have left, then as they came.

    Args:
        waiting: the requests.
        aging_s: seconds of waiting that count as one step of priority.
    """
    line = sorted(waiting, key=lambda r: (-(r.priority + r.waited_s // aging_s), r.served, r.time_left_s, r.id))
    return [request.id for request in line]
