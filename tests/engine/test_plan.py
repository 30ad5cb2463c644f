"""The plan of a step, checked on cases and on random traces in virtual time."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slm_core.engine.plan import ActiveRequest, StepPlan, WaitingRequest, line_up, plan_step

N_TRACES = int(os.environ.get("SLM_TRACES", "500"))
"""Random traces. To try more: SLM_TRACES=100000 pytest tests/engine/test_plan.py"""


def active(number: int, **changes: object) -> ActiveRequest:
    plain = ActiveRequest(
        number, n_held=0, n_pending=10, decoding=False, n_exclusive=0, rank=(0, -number), last_turn=-1
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def all_affordable(n_tokens: int, n_attended: int, depth: int, most: int) -> int:
    return most


def eight_affordable(n_tokens: int, n_attended: int, depth: int, most: int) -> int:
    return min(8, most)


def sizes(plan: object) -> dict[int, int]:
    return {piece.id: piece.n_tokens for piece in plan.pieces}  # type: ignore[attr-defined]


def test_a_long_prompt_does_not_delay_decoding() -> None:
    plan = plan_step([active(0, n_pending=4000), active(1, n_pending=1, decoding=True)], 9999, 512, eight_affordable)
    assert sizes(plan) == {1: 1, 0: 8}


def test_the_batch_is_full_if_no_request_decodes() -> None:
    assert sizes(plan_step([active(0, n_pending=4000)], 9999, 512, eight_affordable)) == {0: 512}


def test_prompts_take_turns() -> None:
    first = active(0, n_pending=100, last_turn=7)
    plan = plan_step([first, active(1, last_turn=6), active(2, n_pending=1, decoding=True)], 999, 512, eight_affordable)
    assert sizes(plan) == {2: 1, 1: 8}


def test_spare_tokens_of_one_prompt_go_to_the_next() -> None:
    plan = plan_step(
        [active(0, n_pending=3), active(1), active(2, n_pending=1, decoding=True)], 999, 512, eight_affordable
    )
    assert sizes(plan) == {2: 1, 0: 3, 1: 5}


def test_the_lowest_rank_is_preempted() -> None:
    requests = [active(i, n_pending=1, decoding=True, n_exclusive=10) for i in range(3)]
    requests[0] = replace(requests[0], rank=(-1, 0))
    plan = plan_step(requests, 1, 512, all_affordable)
    assert plan.preempted == (0,)
    assert sizes(plan) == {1: 1, 2: 1}


def test_shared_positions_free_nothing() -> None:
    requests = [active(i, n_pending=1, decoding=True, n_exclusive=0 if i == 2 else 10) for i in range(3)]
    assert plan_step(requests, 0, 512, all_affordable).preempted == (2, 1)


def test_a_single_request_that_does_not_fit_is_full() -> None:
    plan = plan_step([active(0, n_pending=1, decoding=True, n_exclusive=50)], 0, 512, all_affordable)
    assert (plan.full, plan.pieces, plan.preempted) == (0, (), ())


def test_waiting_time_raises_the_priority() -> None:
    urgent, old = WaitingRequest(5, 2, 0.0, 0.0), WaitingRequest(1, 0, 19.9, 0.0)
    assert line_up([old, urgent], 10) == [5, 1]
    assert line_up([replace(old, waited_s=20.0), urgent], 10) == [1, 5]


def test_equal_priorities_are_ordered_by_service() -> None:
    assert line_up([WaitingRequest(0, 0, 1, 500.0), WaitingRequest(1, 0, 0.5, 20.0)], 10) == [1, 0]


def test_drafts_take_the_spare_room() -> None:
    requests = [active(i, n_pending=1, decoding=True, n_ahead=6) for i in range(3)]
    pieces = {
        piece.id: (piece.n_tokens, piece.n_ahead) for piece in plan_step(requests, 999, 512, eight_affordable).pieces
    }
    assert pieces == {0: (1, 6), 1: (1, 6), 2: (1, 6)}
    for n_free, n_batch in ((10, 512), (999, 10)):
        plan = plan_step(requests, n_free, n_batch, eight_affordable)
        assert [(piece.id, piece.n_tokens, piece.n_ahead) for piece in plan.pieces] == [(0, 1, 6), (1, 1, 1), (2, 1, 0)]
    plan = plan_step(requests, 3, 512, eight_affordable)
    assert (sizes(plan), plan.preempted) == ({0: 1, 1: 1, 2: 1}, ())


def test_drafts_leave_room_for_prompts() -> None:
    requests = [active(0, n_pending=1, decoding=True, n_ahead=64), active(1, n_pending=100)]
    for n_free, n_batch in ((41, 512), (999, 41)):
        plan = plan_step(requests, n_free, n_batch, all_affordable)
        assert [(piece.id, piece.n_tokens, piece.n_ahead) for piece in plan.pieces] == [(0, 1, 20), (1, 20, 0)]
    assert sizes(plan_step(requests, 2, 512, all_affordable)) == {0: 1, 1: 1}


def test_drafts_count_towards_the_time_of_a_step() -> None:
    calls: list[tuple[int, int]] = []

    def recorded(n_tokens: int, n_attended: int, depth: int, most: int) -> int:
        calls.append((n_tokens, n_attended))
        return 1

    plan_step([active(0, n_held=10, n_pending=1, decoding=True, n_ahead=2), active(1)], 999, 512, recorded)
    assert calls == [(3, 11 + 12 + 13)]


# Traces.


@dataclass
class Simulated:
    """A request of a trace: the lengths of its prompt and answer in tokens, its arrival step and its priority."""

    n_prompt: int
    n_answer: int
    arrives: int
    priority: int
    n_held: int = 0
    n_history: int = field(init=False)
    last_turn: int = -1
    waited: int = 0
    draft: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.n_history = self.n_prompt

    @property
    def n_pending(self) -> int:
        return self.n_history - self.n_held

    @property
    def over(self) -> bool:
        return self.n_history == self.n_prompt + self.n_answer


requests_of_a_trace = st.lists(
    st.builds(
        Simulated,
        st.integers(1, 60),
        st.integers(1, 20),
        st.integers(0, 30),
        st.integers(0, 2),
        draft=st.randoms(use_true_random=False),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.timeout(max(300, N_TRACES // 5))
@settings(max_examples=N_TRACES, deadline=None)
@given(requests_of_a_trace, st.integers(81, 200), st.integers(12, 64), st.integers(1, 16))
def test_plans_of_random_traces(trace: list[Simulated], n_ctx: int, n_batch: int, budget: int) -> None:
    """Room is never exceeded; every step has all decoding requests; the wait of prompts is bounded; all requests end.

    Requests draft, and accept a part of each draft. Drafts cause no preemptions.
    """
    admitted: list[int] = []
    bound = 4000
    for step in range(bound):
        if all(request.over for request in trace):
            return
        admitted = [i for i in admitted if not trace[i].over]
        admitted += [i for i, r in enumerate(trace) if r.arrives <= step and not r.over and i not in admitted]
        n_used = sum(trace[i].n_held for i in admitted)
        states = [
            ActiveRequest(
                i,
                trace[i].n_held,
                trace[i].n_pending,
                decoding=trace[i].n_history > trace[i].n_prompt and trace[i].n_pending == 1,
                n_exclusive=trace[i].n_held,
                rank=(trace[i].priority, -i),
                last_turn=trace[i].last_turn,
                n_ahead=trace[i].draft.choice((0, 0, 1, 5, 64)) if trace[i].n_history > trace[i].n_prompt else 0,
            )
            for i in admitted
        ]
        if not states:
            continue
        plan = plan_step(states, n_ctx - n_used, n_batch, lambda a, b, c, most: min(budget, most))
        plain = [replace(state, n_ahead=0) for state in states]
        undrafted = plan_step(plain, n_ctx - n_used, n_batch, lambda a, b, c, most: min(budget, most))
        assert plan.preempted == undrafted.preempted
        assert _has_prompts(plan, states) == _has_prompts(undrafted, states)
        assert plan.full is None, "each request fits alone"
        assert plan.pieces, "a step computes something"
        running = {state.id: state for state in states if state.id not in plan.preempted}
        for number in plan.preempted:
            assert number in admitted
            assert all(running[other].rank > (trace[number].priority, -number) for other in running)
            trace[number].n_held = 0
        n_tokens = sum(piece.n_tokens + piece.n_ahead for piece in plan.pieces)
        assert n_tokens <= n_batch
        assert sum(trace[i].n_held for i in running) + n_tokens <= n_ctx
        decoders = {number for number, state in running.items() if state.decoding}
        in_step = {piece.id for piece in plan.pieces}
        assert decoders <= in_step, "every step has all decoding requests"
        if decoders:
            assert sum(p.n_tokens for p in plan.pieces if p.id not in decoders) <= budget
        _check_turns(trace, running, in_step, decoders, n_ctx - n_used)
        for piece in plan.pieces:
            assert 1 <= piece.n_tokens <= running[piece.id].n_pending
            request = trace[piece.id]
            request.n_held += piece.n_tokens
            request.last_turn = step
            assert 0 <= piece.n_ahead <= running[piece.id].n_ahead
            if request.n_pending == 0:
                n_most = request.n_prompt + request.n_answer - request.n_history - 1
                n_accepted = request.draft.randint(0, min(piece.n_ahead, n_most))
                request.n_history += n_accepted + 1
                request.n_held += n_accepted
            else:
                assert piece.n_ahead == 0
            if request.over:
                request.n_held = 0
    raise AssertionError("a trace did not end")


def _has_prompts(plan: StepPlan, states: list[ActiveRequest]) -> bool:
    prompts = {state.id for state in states if not state.decoding}
    return any(piece.id in prompts for piece in plan.pieces)


def _check_turns(
    trace: list[Simulated], running: dict[int, ActiveRequest], in_step: set[int], decoders: set[int], n_free: int
) -> None:
    """If there is room, a prompt waits for at most one turn of each other prompt."""
    prompts = set(running) - decoders
    skipped = prompts - in_step
    for number in skipped:
        served = prompts & in_step
        assert all(running[other].last_turn <= running[number].last_turn for other in served)
