"""Plans the next step, as a pure function of the requests and the free room."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from slm_core.engine.costs import attended


@dataclass(frozen=True, slots=True)
class ActiveRequest:
    """A request with a sequence, as seen by the planner.

    Attributes:
        id: its number.
        n_held: positions of its sequence.
        n_pending: tokens of its history that are not decoded yet, at least one.
        decoding: whether its answer has begun: it gets a token in every step.
        n_exclusive: positions that dropping its sequence would free.
        rank: the request of the lowest rank is preempted first; ranks are distinct.
        last_turn: the number of the last step that decoded tokens of it; -1 for none.
        n_ahead: tokens that may be decoded after its history, if there is room: drafts, or forced tokens.
    """

    id: int
    n_held: int
    n_pending: int
    decoding: bool
    n_exclusive: int
    rank: tuple[float, ...]
    last_turn: int
    n_ahead: int = 0


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request without a sequence, as seen by the planner.

    Attributes:
        id: its number.
        priority: requests with a larger priority come first.
        waited_s: seconds since it arrived.
        served: tokens that were computed for its key; among equal priorities, the least served key comes first.
        time_left_s: seconds until its timeout; among requests of one key, the shortest time comes first.
    """

    id: int
    priority: float
    waited_s: float
    served: float
    time_left_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request in a step.

    Attributes:
        id: the request's number.
        n_tokens: the number of its pending tokens to decode, from the first on.
        n_ahead: the number of tokens to decode after its history; 0 if some pending tokens are not in the step.
    """

    id: int
    n_tokens: int
    n_ahead: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step.

    Attributes:
        pieces: the tokens to decode, at most one piece per request.
        preempted: requests that give up their sequences before the step, and continue later.
        full: a request that does not fit into the whole context; None if there is none.
    """

    pieces: tuple[Piece, ...]
    preempted: tuple[int, ...] = ()
    full: int | None = None


@dataclass(slots=True)
class _Room:
    """Free positions, and free room in the batch, while a plan is made."""

    n_free: int
    n_batch: int
    pieces: list[Piece] = field(default_factory=list)

    @property
    def left(self) -> int:
        return max(0, min(self.n_free, self.n_batch))

    def take(self, request: ActiveRequest, most: int, n_ahead: int = 0) -> int:
        n = min(request.n_pending, most, self.left)
        if n > 0:
            self.pieces.append(Piece(request.id, n, n_ahead))
            self.n_free -= n + n_ahead
            self.n_batch -= n + n_ahead
        return max(n, 0)


Affordable = Callable[[int, int, int, int], int]
"""The number of prompt tokens that fit into the time of a step. Arguments: tokens and attended positions of the step
so far, the depth of the prompt, and the most tokens of it that could be decoded."""


def plan_step(active: Sequence[ActiveRequest], n_free: int, n_batch: int, affordable: Affordable) -> StepPlan:
    """Plan a step: the pending tokens and tokens ahead of every decoding request, then pieces of prompts, in turn.

    Tokens ahead take at most half of the room that prompts could have, and no request is preempted for them. If
    positions run out, requests are preempted, lowest rank first, until the remaining requests have room.
    """
    remaining, preempted = sorted(active, key=lambda request: request.rank), list[int]()
    while remaining:
        decoding = [request for request in remaining if request.decoding]
        needed = sum(request.n_pending for request in decoding)
        if needed <= n_free and (decoding or n_free):
            return StepPlan(_pieces(remaining, n_free, n_batch, affordable), tuple(preempted))
        if len(remaining) == 1:
            return StepPlan((), tuple(preempted), full=remaining[0].id)
        victim = remaining.pop(0)
        preempted.append(victim.id)
        n_free += victim.n_exclusive
    return StepPlan((), tuple(preempted))


def _pieces(remaining: Iterable[ActiveRequest], n_free: int, n_batch: int, affordable: Affordable) -> tuple[Piece, ...]:
    by_turn = sorted(remaining, key=lambda request: (request.last_turn, tuple(-part for part in request.rank)))
    decoding = [request for request in by_turn if request.decoding]
    prompts = [request for request in by_turn if not request.decoding]
    room, n_tokens, n_attended = _Room(n_free, n_batch), 0, 0
    spare = max(0, room.left - sum(request.n_pending for request in decoding)) // (2 if prompts else 1)
    for request in decoding:
        n_ahead = min(request.n_ahead, spare)
        n = room.take(request, request.n_pending, n_ahead)
        spare -= n_ahead
        n_tokens, n_attended = n_tokens + n + n_ahead, n_attended + attended(request.n_held, n + n_ahead)
    budget = room.n_batch
    if n_tokens and prompts and budget:
        budget = affordable(n_tokens, n_attended, prompts[0].n_held, budget)
    for request in prompts:
        budget -= room.take(request, budget)
    return tuple(room.pieces)


def restore_seconds(step_s: float, decode_s: float, *, has_prompts: bool) -> float:
    """Seconds of a step for restores of dumps: the time that decoding leaves, or half of it if prompts need time, too.

    Args:
        step_s: the time of a step.
        decode_s: expected time to decode a token for each decoding request.
        has_prompts: whether prompts are computed.
    """
    return max(0.0, step_s - decode_s) / (2 if has_prompts else 1)


def line_up(waiting: Sequence[WaitingRequest], aging_s: float) -> list[int]:
    """The numbers of waiting requests, in the order of admission.

    The order is by priority and age, then by served tokens of the key, then by time left, then by arrival.

    Args:
        waiting: the requests.
        aging_s: seconds of waiting that count as one step of priority.
    """
    line = sorted(waiting, key=lambda r: (-(r.priority + r.waited_s // aging_s), r.served, r.time_left_s, r.id))
    return [request.id for request in line]
